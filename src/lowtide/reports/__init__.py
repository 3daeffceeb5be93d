# SPDX-License-Identifier: Apache-2.0
"""Reports: what happened, for people to read. They run nothing."""
