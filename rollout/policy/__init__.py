"""Where a policy comes from: folders, the embedded model, weights and their checksums."""
