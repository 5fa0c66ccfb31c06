"""Tokenises text into shards, without torch, and loads batches from them; see `docs/own-text.md`."""
