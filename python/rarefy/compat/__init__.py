"""Names and semantics of libraries that are gone or frozen, on Rarefy's kernels; docs/migrating.md."""
