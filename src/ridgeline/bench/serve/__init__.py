"""`ridgeline bench serve`: load on an OpenAI-compatible server, and what its clients saw. See docs/load.md."""
