"""The `ridgeline` command."""
