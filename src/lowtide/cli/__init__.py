# SPDX-License-Identifier: Apache-2.0
"""The command line: one verb a file, and nothing imports it."""

from lowtide.cli.app import main as main
