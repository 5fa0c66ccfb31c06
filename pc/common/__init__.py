"""What several parts need: whole writes, a run's folder, one look for figures."""
