"""A checkpoint as a directory that the rest of the field reads: Hugging Face's format, of a Qwen3 model.

    pip install tokenizers safetensors
    python export.py --preset tiny --out exported

    exported/config.json, model.safetensors, generation_config.json      what `transformers` needs
    exported/tokenizer.json, tokenizer_config.json                       text to ids and back
    exported/training.json                                               what `train.py --init_from exported` needs

Nothing is converted but names and the order of axes: the model *is* a small Qwen3 (arXiv:2505.09388) whose heads all
have keys and values of their own.  .ci/run holds both to the same logits.
"""

import dataclasses
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from flax import nnx

import checkpoint
import sample
from cli import parse, run
from config import Config, UserError, check_ranges, knob
from model import abstract_model
from tokenizer import byte_level, huggingface, make_tokenizer

NAMES = {  # of a block: ours and Qwen3's
    "attn.q_proj.kernel": "self_attn.q_proj",
    "attn.k_proj.kernel": "self_attn.k_proj",
    "attn.v_proj.kernel": "self_attn.v_proj",
    "attn.o_proj.kernel": "self_attn.o_proj",
    "attn.q_norm.scale": "self_attn.q_norm",
    "attn.k_norm.scale": "self_attn.k_norm",
    "attn_norm.scale": "input_layernorm",
    "mlp_norm.scale": "post_attention_layernorm",
    "mlp.gate_proj.kernel": "mlp.gate_proj",
    "mlp.up_proj.kernel": "mlp.up_proj",
    "mlp.down_proj.kernel": "mlp.down_proj",
}


@dataclass(frozen=True)
class ExportConfig:
    """One call of export.py."""

    preset: str = knob("tiny", "read the run in out/<preset>")
    out_dir: str = knob("", "read the run in this directory instead")
    which: str = knob("best", "lowest validation loss, or most steps", choices="best latest")
    out: str = knob("exported", "the directory to write")

    def __post_init__(self):
        check_ranges(self)


def parameters(params: dict, cfg: Config) -> dict[str, tuple[dict, str]]:
    """Qwen3's name of each parameter -> where it is: the dict that holds it, and its key there."""
    where = {"model.embed_tokens.weight": (params, "wte"), "model.norm.weight": (params["norm"], "scale")}
    for i in range(cfg.n_layer):
        for ours, theirs in NAMES.items():
            *path, key = ours.split(".")
            holder = params["h"][i]
            for part in path:
                holder = holder[part]
            where[f"model.layers.{i}.{theirs}.weight"] = holder, key
    return where


def to_hf(params: dict, cfg: Config, vocab_size: int) -> dict[str, np.ndarray]:
    """Qwen3's tensors.  Its matrices are [out, in], as PyTorch's are; the vocabulary is not padded."""
    tensors = {}
    for name, (holder, key) in parameters(params, cfg).items():
        x = np.asarray(holder[key])
        tensors[name] = np.ascontiguousarray(x.T if key == "kernel" else x[:vocab_size] if key == "wte" else x)
    return tensors


def from_hf(tensors: dict[str, np.ndarray], cfg: Config, vocab_size: int) -> dict:
    """The reverse; the embedding's padding is zero.  ValueError if a tensor is not as it should be."""
    like = nnx.to_pure_dict(nnx.split(abstract_model(cfg, vocab_size))[1])
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
    for name, (holder, key) in parameters(params, cfg).items():
        if name not in tensors:
            raise ValueError(f"{name} is missing")
        x = tensors[name].T if key == "kernel" else tensors[name]
        room = holder[key][:vocab_size] if key == "wte" else holder[key]
        if x.shape != room.shape:
            raise ValueError(f"{name} has the wrong shape")
        room[:] = x
    return params


def hf_config(cfg: Config, tokenizer) -> dict:
    """config.json.  https://huggingface.co/docs/transformers/model_doc/qwen3"""
    return dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        vocab_size=tokenizer.vocab_size,
        hidden_size=cfg.n_embd,
        intermediate_size=cfg.n_hidden,
        num_hidden_layers=cfg.n_layer,
        num_attention_heads=cfg.n_head,
        num_key_value_heads=cfg.n_head,
        head_dim=cfg.n_embd // cfg.n_head,
        max_position_embeddings=cfg.block_size,
        rope_theta=cfg.rope_theta,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        attention_bias=False,
        tie_word_embeddings=True,
        torch_dtype="float32",
        bos_token_id=None,
        eos_token_id=50_256 if tokenizer.kind == "gpt2" else None,
    )


def hf_tokenizer(tokenizer) -> str:
    """tokenizer.json: the same ids.  (Characters that ours refuses are dropped without a word there.)"""
    if tokenizer.kind == "char":  # byte-pair encoding without pairs, and characters for bytes
        hf = huggingface()
        model = hf.Tokenizer(hf.models.BPE({c: i for i, c in enumerate(tokenizer.symbols)}, []))
        model.decoder = hf.decoders.Fuse()
        return model.to_str()
    if tokenizer.kind == "byte":  # bytes that print stand for themselves, the others for letters from 256 on
        prints = {*range(33, 127), *range(161, 173), *range(174, 256)}
        others = sorted({*range(256)} - prints)
        letters = {b: chr(b) if b in prints else chr(256 + others.index(b)) for b in range(256)}
        return byte_level({letter: b for b, letter in letters.items()}, []).to_str()
    return tokenizer.symbols


def safetensors():
    """The library, loaded when it is needed."""
    try:
        import safetensors.numpy
    except ImportError:
        raise UserError("exported weights need a package that is not here: pip install safetensors") from None
    return safetensors.numpy


def export(how: ExportConfig) -> None:
    out = Path(how.out)
    if out.exists():
        raise UserError(f"--out {how.out} is there already: delete it, or give another")
    params, cfg, tokenizer, step = sample.read_weights(how.out_dir, how.which)
    config = hf_config(cfg, tokenizer)
    ends = dict(eos_token="<|endoftext|>") if tokenizer.kind == "gpt2" else {}
    files = {
        "config.json": config,
        "generation_config.json": dict(do_sample=True, temperature=0.8, eos_token_id=config["eos_token_id"]),
        "tokenizer.json": json.loads(hf_tokenizer(tokenizer)),
        "tokenizer_config.json": dict(
            tokenizer_class="PreTrainedTokenizerFast",
            clean_up_tokenization_spaces=False,
            model_max_length=cfg.block_size,
            **ends,
        ),
        "training.json": dict(
            config=dataclasses.asdict(cfg), tokenizer=dict(kind=tokenizer.kind, symbols=tokenizer.symbols), step=step
        ),
    }
    tensors = safetensors().save(to_hf(params, cfg, tokenizer.vocab_size), {"format": "pt"})
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=out.name, ignore_cleanup_errors=True) as tmp:
        whole = Path(tmp, "whole")
        whole.mkdir()
        for name, content in files.items():
            (whole / name).write_text(json.dumps(content, indent=1), "utf-8")
        (whole / "model.safetensors").write_bytes(tensors)
        whole.rename(out)
    print(f"{how.out} is {how.out_dir} at step {step}, as a Qwen3ForCausalLM.  With transformers and torch:")
    print(f"AutoModelForCausalLM.from_pretrained({how.out!r}), AutoTokenizer.from_pretrained({how.out!r})")


# --- and in ----------------------------------------------------------------------------------------------------------


def exported_meta(folder: Path) -> dict | None:
    """What export wrote into training.json, or None if there is none."""
    path = folder / "training.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def source_tokenizer(cfg: Config):
    """The tokenizer of what is in cfg.init_from, a run's folder or one that export wrote.

    UserError if nothing is, or if its architecture or tokenizer is not that of `cfg`.  Asks JAX nothing.
    """
    try:
        meta = exported_meta(Path(cfg.init_from)) or checkpoint.whole(cfg.init_from, "best")[0][1]
        theirs, tokenizer = Config(**meta["config"]), make_tokenizer(**meta["tokenizer"])
    except (IndexError, KeyError, TypeError, ValueError, OSError) as e:
        why = f"{cfg.init_from} holds no weights that can be read ({checkpoint.reason(e)})"
        raise UserError(f"--init_from {why}: give a run's folder, or one that export.py wrote") from None
    for name in "n_layer", "n_head", "n_embd", "rope_theta", "tokenizer", *["vocab_size"] * (cfg.tokenizer == "bpe"):
        if (old := getattr(theirs, name)) != (new := getattr(cfg, name)):
            raise UserError(f"--init_from {cfg.init_from} has {name} {old}, not {new}: add --{name} {old}")
    return tokenizer


def read_weights(cfg: Config) -> dict:
    """The parameters in cfg.init_from as numpy arrays.  UserError if they cannot be read."""
    meta = exported_meta(Path(cfg.init_from))
    if meta is None:
        return sample.read_weights(cfg.init_from, "best")[0]
    try:
        tensors = safetensors().load_file(Path(cfg.init_from, "model.safetensors"))
        return from_hf(tensors, Config(**meta["config"]), make_tokenizer(**meta["tokenizer"]).vocab_size)
    except UserError:
        raise
    except Exception as e:  # safetensors has errors of its own
        raise UserError(f"--init_from {cfg.init_from}: its model.safetensors: {checkpoint.reason(e)}") from None


def main(argv):
    how, _ = parse(ExportConfig, argv, __doc__)
    export(how)


if __name__ == "__main__":
    run(main)
