"""Tokenise FineWeb, or any parquet files with a text column, into shards for training.

A subset of FineWeb from the Hub, on every core of this machine:
    python scripts/tokenize_fineweb.py --input HuggingFaceFW/fineweb --subset sample-10BT --output data/fineweb-10BT
Local files, with Llama-2's tokenizer:
    python scripts/tokenize_fineweb.py --input 'parquet/*.parquet' --output data/mine --tokenizer Llama-2-7b-hf
On 64 machines of a SLURM cluster, each doing its share:
    sbatch --array=0-63 --cpus-per-task=32 --wrap "python scripts/tokenize_fineweb.py --input … --output …"

After a stop of any kind, the same command goes on with what is missing.
"""

from pc.data.tokenizing import main

if __name__ == "__main__":
    main()
