"""Two exports in other programs: ids of texts, and log-probabilities of the entry after a prompt, beside this recipe's own.

    python benchmarks/exports.py WORK                          # what the environment has; the rest is "not tried"
    python benchmarks/exports.py WORK --tool transformers-4=FOLDER --tool llama.cpp=FOLDER

WORK gets the exports of two tiny runs: `default` has the default tokenizer, `bytes` one of train_tokenizer.py, another RoPE
base and grouped heads. FOLDER is one that `pip install --no-deps --target FOLDER` filled; each tool runs in a process of its
own that imports from there first. What each needs:

    transformers-4   transformers==4.57.3 'huggingface_hub<1' tokenizers==0.22.1
    transformers     any other transformers
    trl              trl
    ctranslate2      ctranslate2
    mlx              mlx mlx-cpu mlx-lm
    llama.cpp        xllamacpp; beside it, unpacked, the sdist of llama-cpp-python, which has the converter
    javascript       `npm install @huggingface/tokenizers` instead; needs node
"""

import argparse
import importlib.metadata
import json
import math
import os
import random
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    "default": ["--model.vocab_size", "32000"],
    "bytes": ["--model.vocab_size", "1000", "--model.rope_theta", "500000", "--model.n_kv_heads", "2"],
}
SHAPE = [
    "--model.n_layers", "2", "--model.dim", "64", "--model.n_heads", "4", "--model.init_std", "0.2", "--training.seq_len",
    "128", "--training.local_batch_size", "4", "--training.global_batch_size", "4", "--training.steps", "2",
    "--lr_scheduler.warmup_steps", "1", "--checkpoint.interval", "2", "--validation.freq", "2", "--diagnostics.freq", "0",
    "--data.validation_sequences", "4", "--diagnostics.spectra_freq", "0", "--metrics.enable_tensorboard", "false",
]  # fmt: skip
ODD = [
    "", " ", "  two in front", "a  b   c    d", "def f(x):\n    return x  # two\n", "line\n\nline\ttab\r\n", "behind   ", "\ufeffmark",
    "naïve café, Ωμέγα, Привет, 漢字, 🙂👩‍👩‍👧", "ﬁ ½ Ａ \u00a0 \u200b e\u0301", "3.14159 + 2_000 = x**2", "don't 'tis I'LL", "▁x <0x41>",
]  # fmt: skip
PROMPT = 48  # ids, enough for another RoPE base to show


# --- the exports and what this recipe itself gives ----------------------------------------------------


def run(*words: object) -> None:
    subprocess.run([sys.executable, *map(str, words)], check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})


def read_texts() -> list[str]:
    """Paragraphs of the documents, and odd ones; none spells a special entry, which is text here and an entry elsewhere."""
    paragraphs = [text for page in sorted((ROOT / "docs").glob("*.md")) for text in page.read_text().split("\n\n")]
    return ODD + [text for text in paragraphs if "</s>" not in text and "<s>" not in text][:250]


def prepare(work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    texts = read_texts()
    (work / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 3 if text.strip()))
    run(
        "scripts/train_tokenizer.py", "--input", work / "text.jsonl", "--output", work / "trained", "--vocab-size", 1000
    )
    for kind, options in KINDS.items():
        tokenizer = "mistral-common" if kind == "default" else work / "trained"
        data = work / f"{kind}-data"
        words = [
            "--input",
            work / "text.jsonl",
            "--output",
            data,
            "--tokenizer",
            tokenizer,
            "--validation-fraction",
            0.2,
        ]
        run("scripts/tokenize_text.py", *words)
        folder = ["--job.dump_folder", work / f"{kind}-run", "--data.path", data]
        run("-m", "pc_recipe.runs.local", "train_configs/demo.toml", *folder, *SHAPE, *options)
        run("scripts/export_hf.py", work / f"{kind}-run", work / kind)
        refer(work / f"{kind}-run", work / f"{kind}.json", texts)


def refer(run: Path, file: Path, texts: list[str]) -> None:
    """Write the texts, our ids of each, a prompt and our log-probabilities after it."""
    import torch

    from pc_recipe.evaluate import hugging_face

    model, tokenizer = hugging_face.load(run)
    ids = [tokenizer.encode(text) for text in texts]
    prompt = [index for one in ids[40:] for index in one][:PROMPT]
    with torch.no_grad():
        log_p = model(torch.tensor([prompt])).logits[0, -1].double().log_softmax(-1)
    file.write_text(json.dumps({"texts": texts, "ids": ids, "prompt": prompt, "log_p": log_p.tolist()}))


# --- one function for each program; it runs in a process of its own -------------------------------------
# Each takes an export, the texts, the prompt and the tool's folder, and returns {"version": ...} with "ids" of the texts,
# "log_p" after the prompt, and "note", as far as the program has them.


def log_softmax(logits: Any) -> list[float]:
    import numpy as np

    values = np.asarray(logits, dtype=np.float64)
    values = values - values.max()
    return (values - math.log(np.exp(values).sum())).tolist()


def in_transformers(export: str, texts: list[str], prompt: list[int], folder: str, **options: Any) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, __version__

    tokenizer, model = AutoTokenizer.from_pretrained(export), AutoModelForCausalLM.from_pretrained(export, **options)
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1].float()
    ids = [tokenizer(text)["input_ids"] for text in texts]
    return {"version": f"transformers {__version__}", "ids": ids, "log_p": log_softmax(logits)}


def in_torchao(export: str, texts: list[str], prompt: list[int], folder: str) -> dict[str, Any]:
    """Weights in 8 bits, by transformers."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    found = in_transformers(export, texts, prompt, folder, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    return found | {"version": f"torchao {importlib.metadata.version('torchao')}, int8 weights"}


def in_trl(export: str, texts: list[str], prompt: list[int], folder: str) -> dict[str, Any]:
    """Ten steps of LoRA. The note has the end of text: how often it is a label, its probability before and after."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer, model = AutoTokenizer.from_pretrained(export), AutoModelForCausalLM.from_pretrained(export)
    rows = Dataset.from_list([{"text": f"Question {i}. Yes."} for i in range(40)])

    @torch.no_grad()
    def ends() -> float:
        given = tokenizer("Question 7. Yes.", return_tensors="pt")["input_ids"]
        return model(given).logits[0, -1].float().softmax(-1)[tokenizer.eos_token_id].item()

    before = ends()
    settings = SFTConfig(
        output_dir=f"{export}-tuned", max_steps=10, per_device_train_batch_size=4, learning_rate=1e-2, max_length=64, seed=0,
        lr_scheduler_type="constant", report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    lora = LoraConfig(r=16, target_modules="all-linear", modules_to_save=["lm_head"])
    trainer = SFTTrainer(model=model, args=settings, train_dataset=rows, processing_class=tokenizer, peft_config=lora)
    labels = next(iter(trainer.get_train_dataloader()))["labels"]
    last = [one[one != -100][-1].item() for one in labels]
    trainer.train()
    model = trainer.model.eval()
    versions = f"trl {importlib.metadata.version('trl')}, peft {importlib.metadata.version('peft')}"
    note = f"EOS ends {last.count(tokenizer.eos_token_id)} of {len(last)} labels; after the text {before:.2g} to {ends():.2g}"
    return {"version": versions, "note": note}


def in_ctranslate2(export: str, texts: list[str], prompt: list[int], folder: str) -> dict[str, Any]:
    import ctranslate2
    import numpy as np
    from transformers import AutoTokenizer

    converted = ctranslate2.converters.TransformersConverter(export).convert(f"{export}-ct2", force=True)
    generator = ctranslate2.Generator(converted, device="cpu", compute_type="float32")
    names = AutoTokenizer.from_pretrained(export).convert_ids_to_tokens(prompt)
    logits = np.array(generator.forward_batch([names]))[0, -1]
    return {
        "version": f"ctranslate2 {ctranslate2.__version__}",
        "log_p": log_softmax(logits),
        "note": "has no tokenizer",
    }


def in_mlx(export: str, texts: list[str], prompt: list[int], folder: str) -> dict[str, Any]:
    import mlx.core as mx
    import numpy as np
    from mlx_lm import load

    model, tokenizer = load(export)
    logits = np.array(model(mx.array([prompt]))[0, -1].astype(mx.float32))
    ids = [tokenizer.encode(text) for text in texts]
    return {"version": f"mlx-lm {importlib.metadata.version('mlx-lm')}", "ids": ids, "log_p": log_softmax(logits)}


CONVERT = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
from conversion.base import TextModel
if splitting := sys.argv[2]:
    TextModel.get_vocab_base_pre = lambda *_: splitting
sys.argv[:] = [sys.argv[1] + "/convert_hf_to_gguf.py", *sys.argv[3:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def in_llama_cpp(export: str, texts: list[str], prompt: list[int], folder: str) -> dict[str, Any]:
    """By its own converter, which is told the splitting of a byte-level tokenizer if it does not know it."""
    import xllamacpp

    (converter,) = Path(folder).parent.glob("llama_cpp_python-*/vendor/llama.cpp")
    version = (
        f"llama.cpp of xllamacpp {importlib.metadata.version('xllamacpp')}, converter of {converter.parents[1].name}"
    )
    note, file = "", f"{export}.gguf"
    for splitting in ("", "gpt-2"):
        words = [
            sys.executable,
            "-c",
            CONVERT,
            str(converter),
            splitting,
            export,
            "--outfile",
            file,
            "--outtype",
            "f32",
        ]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if not done.returncode:
            break
        note = f"converter: {done.stderr.strip().splitlines()[-1]}; then told `gpt-2`"
    else:
        return {"version": version, "note": note}
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.cpuparams.n_threads, settings.n_parallel = file, 2048, 1, 1
    settings.warmup = False
    settings.cache_type_k = settings.cache_type_v = settings.flash_attn_type = 0  # float32, and no flash attention
    server = xllamacpp.Server(settings)

    def ask(path: str, **question: Any) -> Any:
        sent = json.dumps(question).encode()
        request = urllib.request.Request(server.listening_address + path, sent, {"Content-Type": "application/json"})
        return json.loads(urllib.request.urlopen(request, timeout=120).read())

    ids = [ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"] for text in texts]
    answer = ask("/completion", prompt=prompt, n_predict=1, n_probs=40_000, temperature=0)["completion_probabilities"][
        0
    ]
    found = {one["id"]: one["logprob"] for one in answer["top_logprobs"]}
    return {"version": version, "ids": ids, "log_p": [found.get(i) for i in range(max(found) + 1)], "note": note}


ENCODE = """
const { Tokenizer } = await import(process.argv[1]);
const fs = await import("node:fs");
const read = (file) => JSON.parse(fs.readFileSync(file, "utf8"));
const folder = process.argv[2];
const tokenizer = new Tokenizer(read(folder + "/tokenizer.json"), read(folder + "/tokenizer_config.json"));
console.log(JSON.stringify(read(process.argv[3]).texts.map((text) => tokenizer.encode(text).ids)));
"""


def in_javascript(export: str, texts: list[str], prompt: list[int], folder: str) -> dict[str, Any]:
    package = Path(folder, "node_modules/@huggingface/tokenizers")
    module = package / "dist/tokenizers.mjs"
    words = ["node", "--input-type=module", "-e", ENCODE, str(module), export, f"{export}.json"]
    ids = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return {
        "version": f"@huggingface/tokenizers {json.loads((package / 'package.json').read_text())['version']}",
        "ids": ids,
    }


def in_lm_eval(export: str, texts: list[str], prompt: list[int], folder: str) -> dict[str, Any]:
    """Rolling log-likelihoods, by default and with add_bos_token=False, beside the sum over one sentence's ids."""
    import torch
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    text, sums = "The river carries the water to the sea.", {}
    for option in ({}, {"add_bos_token": False}):
        lm = HFLM(pretrained=export, device="cpu", dtype="float32", **option)
        asked = [Instance("loglikelihood_rolling", {}, (text,), 0)]
        sums[bool(option)] = lm.loglikelihood_rolling(asked, disable_tqdm=True)[0]
    ids = torch.tensor([[lm.tokenizer.bos_token_id, *lm.tokenizer(text, add_special_tokens=False)["input_ids"]]])
    with torch.no_grad():
        own = lm.model(ids).logits[0, :-1].double().log_softmax(-1).gather(1, ids[0, 1:, None]).sum().item()
    note = f"rolling: off by {abs(sums[False] - own):.2g} nats; with add_bos_token=False by {abs(sums[True] - own):.2g}"
    return {"version": f"lm-eval {importlib.metadata.version('lm_eval')}", "note": note}


TOOLS = {
    "transformers": (in_transformers, "folder"),
    "transformers-4": (in_transformers, "folder"),
    "torchao": (in_torchao, "folder, `TorchAoConfig`"),
    "trl": (in_trl, "folder, `SFTTrainer`, LoRA, ten steps"),
    "lm-eval": (in_lm_eval, "folder, `--model hf`"),
    "ctranslate2": (in_ctranslate2, "`TransformersConverter`"),
    "mlx": (in_mlx, "folder"),
    "llama.cpp": (in_llama_cpp, "`convert_hf_to_gguf.py`, f32"),
    "javascript": (in_javascript, "`tokenizer.json`, `tokenizer_config.json`"),
}
IN_ENVIRONMENT = ("transformers", "torchao", "lm-eval")


# --- the table --------------------------------------------------------------------------------------


def ask(tool: str, kind: str, work: Path, folder: str) -> dict[str, Any]:
    words = [sys.executable, __file__, str(work), "--probe", tool, kind, folder]
    environment = os.environ | {"PYTHONPATH": folder, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return {"version": tool, "note": f"failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}"}
    return json.loads(done.stdout.splitlines()[-1])


def compare(found: dict[str, Any], own: dict[str, Any]) -> tuple[str, str]:
    """How many texts have other ids, and the largest difference of log-probabilities."""
    differ = far = "–"
    if "ids" in found:
        wrong = [index for index, (a, b) in enumerate(zip(found["ids"], own["ids"], strict=True)) if a != b]
        differ = f"{len(wrong)} of {len(own['ids'])}" + (f" (first {own['texts'][wrong[0]]!r:.30})" if wrong else "")
    if "log_p" in found:
        pairs = [(a, b) for a, b in zip(found["log_p"], own["log_p"], strict=False) if a is not None]
        far = f"{max(abs(a - b) for a, b in pairs):.1e}" + (
            "" if len(pairs) == len(own["log_p"]) else f" of {len(pairs)}"
        )
    return differ, far


def table(work: Path, folders: dict[str, str]) -> str:
    lines = [
        "| program | given | export | other ids | largest difference of log-probabilities | |",
        "|---|---|---|---|---|---|",
    ]
    for tool, (_, how) in TOOLS.items():
        if tool not in folders:
            lines.append(f"| {tool} | {how} | | not tried | | |")
            continue
        for kind in KINDS:
            found = ask(tool, kind, work, folders[tool])
            cells = compare(found, json.loads((work / f"{kind}.json").read_text()))
            lines.append(f"| {found['version']} | {how} | {kind} | {cells[0]} | {cells[1]} | {found.get('note', '')} |")
            print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for runs, exports and the table")
    parser.add_argument("--tool", action="append", default=[], metavar="NAME=FOLDER", help=f"one of {', '.join(TOOLS)}")
    parser.add_argument(
        "--probe", nargs=3, metavar=("TOOL", "EXPORT", "FOLDER"), help="one tool on one export, as JSON"
    )
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    if arguments.probe:
        tool, kind, folder = arguments.probe
        own = json.loads((work / f"{kind}.json").read_text())
        print(json.dumps(TOOLS[tool][0](str(work / kind), own["texts"], own["prompt"], folder)))
        return
    random.seed(0)
    folders = dict.fromkeys(IN_ENVIRONMENT, "") | dict(given.split("=", 1) for given in arguments.tool)
    if not (work / "bytes.json").exists():
        prepare(work)
    (work / "table.md").write_text(table(work, folders))


if __name__ == "__main__":
    main()
