"""The example of docs/add_a_format.md."""
