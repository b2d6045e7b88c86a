"""Are exported models the same models to Hugging Face's transformers, which knows nothing of this repository?

    python .ci/huggingface.py make DIR DATASETS   here: train a little with each tokenizer, export, note what comes out
    python .ci/huggingface.py check DIR           where transformers and torch are, and jax is not: the same must come

The first one also holds GPT-2's encoding to tiktoken's.
"""

import json
import sys
from pathlib import Path

import numpy as np

TOKENIZERS = "char", "byte", "bpe", "gpt2"
PROMPT = "ROMEO:\nWhat, "
TEXTS = [
    PROMPT,
    "First Citizen:\n  We are  accounted poor citizens,\n\n\nthe patricians good. ",
    " it's 3 o'clock -- & so,\n",
]
FOREIGN = ["naïve café 日本語 🙂\u200d\t\r\n end", "<|endoftext|>", ""]  # with characters that the corpus has not


def make(folder: Path, data_dir: str) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import jax.numpy as jnp

    import export
    import sample
    import train
    from config import PRESETS, Config
    from corpus import find_corpus
    from generate import SampleConfig, generate

    for kind in TOKENIZERS:
        run, out = str(folder / "run" / kind), str(folder / kind)
        shape = dict(n_layer=2, n_embd=64, n_head=2, block_size=64, learning_rate=3e-3)
        short = dict(max_steps=12 if kind == "gpt2" else 80, eval_interval=1000, sample_tokens=0, eval_tokens=2_000)
        knobs = PRESETS["nano"] | shape | short
        cfg = Config(**knobs, data_dir=data_dir, tokenizer=kind, vocab_size=500, out_dir=run)
        assert train.train(cfg) == 0
        export.export(export.ExportConfig(out_dir=run, out=out))
        model, cfg, tokenizer, *_ = sample.load_model(run, "best")
        if kind == "gpt2":  # another implementation of it, on the whole corpus
            compare_with_tiktoken(tokenizer, data_dir, [*TEXTS, *FOREIGN, find_corpus(cfg).path.read_text("utf-8")])
        ids = tokenizer.encode(TEXTS[1])[:64]
        logits = model(jnp.asarray(ids, jnp.int32)[None])[0][0, :, : tokenizer.vocab_size]
        greedy = SampleConfig(max_new_tokens=40, temperature=0.0)
        new = np.concatenate([part[0] for part in generate(model, cfg, tokenizer.encode(PROMPT), greedy)])
        texts = TEXTS + (FOREIGN if kind != "char" else [])
        expected = dict(
            ids=[tokenizer.encode(text).tolist() for text in texts],
            texts=texts,
            logits=np.asarray(logits).tolist(),
            greedy=PROMPT + tokenizer.decode(new),
        )
        Path(out, "expected.json").write_text(json.dumps(expected))


def compare_with_tiktoken(tokenizer, data_dir: str, texts: list[str]) -> None:
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    import download

    vocabulary, merges = map(str, download.gpt2_vocabulary(Path(data_dir) / "gpt2"))
    ranks = data_gym_to_mergeable_bpe_ranks(merges, vocabulary)
    # How GPT-2's encoder.py cuts a text into words.
    words = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    theirs = tiktoken.Encoding("gpt2", pat_str=words, mergeable_ranks=ranks, special_tokens={})
    for text in texts:
        assert tokenizer.encode(text).tolist() == theirs.encode_ordinary(text), text[:80]
    print(f"gpt2: {sum(map(len, texts)):,} characters have the ids that tiktoken gives them")


def check(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for kind in TOKENIZERS:
        expected = json.loads((folder / kind / "expected.json").read_text())
        tokenizer = AutoTokenizer.from_pretrained(folder / kind)
        model = AutoModelForCausalLM.from_pretrained(folder / kind)
        for text, ids in zip(expected["texts"], expected["ids"]):
            assert kind == "gpt2" and "<|" in text or tokenizer.encode(text) == ids, (kind, text)
            assert tokenizer.decode(ids) == text, (kind, text, tokenizer.decode(ids))
        ids, logits = expected["ids"][1][:64], np.array(expected["logits"])
        with torch.no_grad():
            theirs = model(torch.tensor([ids])).logits[0].numpy()
        difference = np.abs(theirs - logits).max()
        prompt = tokenizer(PROMPT, return_tensors="pt")
        out = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0]
        text = tokenizer.decode(out)
        name = type(model).__name__
        print(
            f"{kind}: {name}, logits {logits.shape}, differ by {difference:.1e}, are up to {np.abs(logits).max():.1f}"
        )
        print(f"{kind}: greedy text {text!r}")
        assert name == "Qwen3ForCausalLM" and difference < 1e-4
        assert text == expected["greedy"], (text, expected["greedy"])


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    make(folder, sys.argv[3]) if sys.argv[1] == "make" else check(folder)
