"""The post-warm-up stability study: one warm-up, then the same updates in every backend."""
