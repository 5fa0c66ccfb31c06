"""Train a small tokenizer on your own text, for models that a large vocabulary would outweigh.

python scripts/train_tokenizer.py --input text/ --vocab-size 4096 --output tokenizers/mine-4096
"""

from pc.data.new_tokenizer import main

if __name__ == "__main__":
    main()
