"""Tokenises text into shards, without torch, and loads batches from them; see `docs/data.md`."""
