"""Shows what a folder of token shards contains."""

from pathlib import Path

import numpy as np

from pc.data.manifest import SPLITS, Manifest
from pc.data.shards import checksum_complaint, open_tokens, read_offsets
from pc.data.tokenizers import Tokenizer
from pc.errors import UserError

SHOWN_CHARACTERS = 300  # of each document


def describe(manifest: Manifest) -> str:
    tokenizer = manifest.tokenizer
    lines = [
        f"source       {manifest.source['input']}"
        + (f", subset {manifest.source['subset']}" if manifest.source["subset"] else "")
        + f" ({len(manifest.source['files'])} files)",
        f"tokenizer    {tokenizer.name} ({tokenizer.kind}, {tokenizer.vocab_size:,} entries, "
        f"BOS {tokenizer.bos_id}, EOS {tokenizer.eos_id}, sha256 {tokenizer.sha256[:12]}…)",
        f"split        {manifest.split_rule}",
    ]
    for split in SPLITS:
        documents, tokens = manifest.documents(split), manifest.tokens(split)
        lines.append(
            f"{split:12} {len(manifest.shards[split])} shards, {documents:,} documents, {tokens:,} tokens "
            f"({manifest.dtype}), {tokens / max(1, documents):.0f} tokens per document"
        )
    return "\n".join(lines)


def verify(manifest: Manifest) -> None:
    """Verify all checksums, and the offsets against the tokens; reads every byte."""
    for split in SPLITS:
        for shard in manifest.shards[split]:
            if complaint := checksum_complaint(manifest.folder, shard):
                raise UserError(f"{complaint}; delete the file and repeat the tokenising command to recreate it")


def document_lengths(manifest: Manifest, split: str) -> np.ndarray:
    """Tokens of each document, including BOS and EOS [documents]."""
    offsets = [read_offsets(manifest.folder, shard) for shard in manifest.shards[split]]
    return np.concatenate([np.zeros(0, dtype=np.int64)] + [np.diff(one) for one in offsets])


def token_counts(manifest: Manifest, split: str) -> np.ndarray:
    """Number of occurrences of each token id [vocab_size]."""
    counts = np.zeros(manifest.vocab_size, dtype=np.int64)
    for shard in manifest.shards[split]:
        tokens = open_tokens(manifest.folder, shard, manifest.dtype)
        for start in range(0, len(tokens), 10**7):  # in pieces, because bincount copies its input to int64
            piece = np.bincount(tokens[start : start + 10**7], minlength=manifest.vocab_size)
            if len(piece) > manifest.vocab_size:
                raise UserError(f"{manifest.folder / shard.tokens_file} holds tokens that its tokenizer does not have")
            counts += piece
    return counts


def read_documents(manifest: Manifest, split: str, count: int) -> list[np.ndarray]:
    """Tokens of `count` documents, evenly spaced over the split."""
    total = manifest.documents(split)
    wanted = sorted({i * total // count for i in range(count)}) if total else []
    documents, first = [], 0
    for shard in manifest.shards[split]:
        here = [i - first for i in wanted if first <= i < first + shard.documents]
        if here:
            tokens = open_tokens(manifest.folder, shard, manifest.dtype)
            offsets = read_offsets(manifest.folder, shard)
            documents += [tokens[offsets[i] : offsets[i + 1]] for i in here]
        first += shard.documents
    return documents


def plot_lengths(lengths: dict[str, np.ndarray], path: str | Path) -> Path:
    """Plot the distribution of document lengths by documents and by tokens."""
    from pc.common import plots

    figure, axes = plots.subplots(1, 2)
    together = np.concatenate(list(lengths.values()))
    bins = np.geomspace(together.min(), together.max() + 1, 60)
    for split, one in lengths.items():
        if len(one):
            axes[0].hist(one, bins, weights=np.full(len(one), 100 / len(one)), histtype="step", label=split)
            axes[1].hist(one, bins, weights=100 * one / one.sum(), histtype="step", label=split)
    for axis, what in zip(axes, ("documents", "tokens"), strict=True):
        axis.set(xscale="log", xlabel="document length [tokens]", ylabel=f"share of {what} per bin [%]")
    axes[0].legend()
    return plots.save(figure, path)


def _show_documents(manifest: Manifest, tokenizer: Tokenizer, count: int) -> None:
    for tokens in read_documents(manifest, "train", count):
        text = tokenizer.decode(tokens[int(tokenizer.bos_id is not None) : -1].tolist())
        shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " …"
        print(f"\n--- document of {len(tokens):,} tokens ---\n{shown}")


def _show_counts(counts: np.ndarray, tokenizer: Tokenizer, count: int = 20) -> None:
    total = max(1, int(counts.sum()))
    print(f"\n{np.count_nonzero(counts):,} of {len(counts):,} ids occur. The most frequent:")
    for token in np.argsort(-counts, kind="stable")[:count]:
        share = counts[token] / total
        bar = "#" * round(share * 400)
        print(f"  {token:>6}  {tokenizer.decode([token])!r:14} {100 * share:5.2f} %  {bar}")


def inspect(folder: str, documents: int, plot: str | None) -> None:
    """Print what a folder of shards contains, verify its checksums, and plot its document lengths.

    Args:
        documents: number of documents to show.
        plot: file of the plot without .png; None: in the folder.
    """
    manifest = Manifest.read(folder)
    print(describe(manifest))
    verify(manifest)
    print("checksums    correct")
    tokenizer = manifest.load_tokenizer()
    _show_documents(manifest, tokenizer, documents)
    _show_counts(token_counts(manifest, "train"), tokenizer)
    lengths = {split: document_lengths(manifest, split) for split in SPLITS}
    print()
    for split, one in lengths.items():
        if len(one):
            shares = np.percentile(one, [0, 5, 50, 95, 100]).astype(int)
            print(
                f"{split} document lengths in tokens: minimum {shares[0]}, 5th percentile {shares[1]}, "
                f"median {shares[2]}, 95th percentile {shares[3]}, maximum {shares[4]:,}"
            )
    written = plot_lengths(lengths, plot or Path(folder) / "document-lengths")
    print(f"Plot: {written}")
