"""Check a config without a GPU: names, types, sizes, data, memory and disk.

python scripts/dry_run.py CONFIG.toml [--world-size 8] [--no-data] [--section.key value ...]
"""

from pc.launch.dry_run import main

if __name__ == "__main__":
    main()
