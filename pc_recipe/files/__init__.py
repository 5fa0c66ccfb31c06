"""Files that commands share: a run's folder, records, logs, locks; reading and writing that a fault cannot spoil."""
