# SPDX-License-Identifier: Apache-2.0
"""The version of lowtide: the build reads it here."""

VERSION = "0.1.0"
