"""What a recorded iteration would do on a device that is not at hand."""
