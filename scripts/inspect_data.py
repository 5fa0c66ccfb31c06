"""Look into a folder of token shards: what it was made from, some documents, lengths, tokens, checksums.

python scripts/inspect_data.py data/demo
python scripts/inspect_data.py data/demo --documents 10 --plot outputs/demo-lengths
"""

from pc.data.inspection import main

if __name__ == "__main__":
    main()
