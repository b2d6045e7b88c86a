"""make_mesh_and_shardings: every layout computes the same, cuts what it says, and sends what theory says; and remat."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

import train
from corpus import load_corpus
from data import get_batch
from hlo import read_program
from model import abstract_model

MESHES = [(1, 1), (8, 1), (4, 1), (4, 2), (1, 4)]  # fsdp, tensor; data takes what is left of eight
F32 = 4


@pytest.fixture
def cfg(cfg):
    """Wide enough that matrices are most of the state, and heads for four devices."""
    return replace(cfg, n_layer=2, n_head=4, n_embd=64, log_interval=1)


def set_up(cfg, devices=None):
    """(vocabulary, hardware, abstract model) as train() makes them."""
    V = load_corpus(cfg).tokenizer.vocab_size
    hw = train.make_mesh_and_shardings(cfg, train.make_init_state(cfg, V), devices)
    return V, hw, nnx.split(abstract_model(cfg, V, hw.dtype))[0]


def run(cfg, devices=None, n=20):
    """(losses of n steps, the final state, the compiled step's number of programs)"""
    tokens = load_corpus(cfg).train
    V, hw, graph = set_up(cfg, devices)
    state = jax.jit(train.make_init_state(cfg, V), out_shardings=hw.layout)()
    step, losses = train.make_train_step(cfg, graph, hw), []
    for i in range(n):
        state, metrics = step(state, jax.device_put(get_batch(tokens, cfg, i), hw.batch), np.int32(i))
        losses.append(float(metrics["loss"]))
    return losses, state, step._cache_size()


@pytest.fixture(scope="module")
def on_one_device():
    """The losses on one device, computed once for each rate of dropout."""
    known = {}

    def losses(cfg):
        if cfg.dropout not in known:
            known[cfg.dropout] = run(cfg, devices=1)[0]
        return known[cfg.dropout]

    return losses


@pytest.mark.parametrize("fsdp, tensor", MESHES)
def test_eight_devices_compute_what_one_does(cfg, fsdp, tensor, on_one_device):
    """Twenty steps with dropout: the same losses; one program; and after them parameters and both moments take up on
    each device what the formula says."""
    losses, state, programs = run(replace(cfg, fsdp=fsdp, tensor=tensor))
    np.testing.assert_allclose(losses, on_one_device(cfg), rtol=1e-4)
    assert losses[-1] < 0.8 * losses[0] and programs == 1
    C, F, D, L, V = cfg.n_embd, cfg.n_hidden, cfg.n_embd // cfg.n_head, cfg.n_layer, 128
    expected = (L * (4 * C * C + 3 * C * F) + V * C) // (fsdp * tensor) + L * (2 * C + 2 * D) + C
    moments = state.opt_state[1][0]
    for tree in state.params, moments.mu, moments.nu:
        for device in range(8):
            pieces = [x.addressable_shards[device].data.size for x in jax.tree.leaves(tree)]
            assert sum(pieces) == expected


def test_vocabulary_that_does_not_divide_is_not_cut_by_tensor(cfg):
    """128 rows over 3 devices: the embedding is left whole, and all else is cut."""
    _, hw, _ = set_up(replace(cfg, n_head=6, n_embd=72, tensor=3), devices=3)
    shape = lambda x: x.sharding.shard_shape(x.shape)
    assert shape(hw.state.params["wte"]) == (128, 72)
    assert shape(hw.state.params["h"][0]["attn"]["q_proj"]["kernel"]) == (72, 24)


@pytest.mark.parametrize("fsdp, tensor", [(8, 1), (4, 2)])
def test_state_is_born_in_pieces(cfg, fsdp, tensor):
    """No device ever holds the whole state while it is made: results and temporaries together stay far below."""
    cfg = replace(cfg, fsdp=fsdp, tensor=tensor, n_embd=256)
    V, hw, _ = set_up(cfg)
    memory = jax.jit(train.make_init_state(cfg, V), out_shardings=hw.layout).lower().compile().memory_analysis()
    whole = sum(F32 * x.size for x in jax.tree.leaves(hw.state))
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < 0.3 * whole


@pytest.mark.parametrize("fsdp, tensor", MESHES)
def test_micro_batches_are_the_batch_on_every_mesh(cfg, fsdp, tensor, on_one_device):
    """Without dropout, which draws anew in each, two micro-batches make the same updates as one batch on one device."""
    expected = on_one_device(replace(cfg, dropout=0.0))[:5]
    losses = run(replace(cfg, dropout=0.0, grad_accum=2, fsdp=fsdp, tensor=tensor), n=5)[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def temporaries(cfg, devices=None):
    """Bytes that the compiled step needs on a device beside the state."""
    _, hw, graph = set_up(cfg, devices)
    batch = jax.ShapeDtypeStruct((cfg.batch_size, cfg.block_size + 1), np.int32, sharding=hw.batch)
    step = train.make_train_step(cfg, graph, hw).lower(hw.state, batch, jax.ShapeDtypeStruct((), np.int32))
    return step.compile().memory_analysis().temp_size_in_bytes


def test_micro_batches_need_less_memory(cfg):
    """What a step of eight needs is what one of them needs alone, the batch, and gradients three times: the sum, what
    is added to it, and the mean."""
    cfg = replace(cfg, batch_size=256, fsdp=4, tensor=2)
    whole, eighth = temporaries(cfg), temporaries(replace(cfg, grad_accum=8))
    alone = temporaries(replace(cfg, batch_size=32))
    gradients = sum(sizes(cfg)[:2]) / 8
    batch = F32 * cfg.batch_size * (cfg.block_size + 1)
    assert eighth < whole / 4 and eighth < alone + batch + 3 * gradients


# --- what is sent ----------------------------------------------------------------------------------------------------


def sent(cfg):
    """What read_program counts in the compiled train step and in the evaluation, which is a forward pass."""
    V, hw, graph = set_up(cfg)
    B, T = cfg.batch_size, cfg.block_size
    batch = jax.ShapeDtypeStruct((B, T + 1), np.int32, sharding=hw.batch)
    weights = jax.ShapeDtypeStruct((B, T), np.float32, sharding=hw.batch)
    step = train.make_train_step(cfg, graph, hw).lower(hw.state, batch, jax.ShapeDtypeStruct((), np.int32))
    evaluation = train.make_eval_step(graph).lower(hw.state.params, batch, weights)
    return [read_program(program.compile().as_text())[1] for program in (step, evaluation)]


def sizes(cfg):
    """Bytes of (matrices and embedding, norm scales, embedding)"""
    C, F, D, L, V = cfg.n_embd, cfg.n_hidden, cfg.n_embd // cfg.n_head, cfg.n_layer, 128
    return F32 * (L * (4 * C * C + 3 * C * F) + V * C), F32 * (L * (2 * C + 2 * D) + C), F32 * V * C


def test_data_parallelism_sends_each_gradient_once(cfg):
    """One all-reduce, of all gradients and the loss, the embedding's twice for its two uses; nothing is gathered."""
    cfg = replace(cfg, dropout=0.0)
    step, evaluation = sent(cfg)
    matrices, scales, embedding = sizes(cfg)
    assert step == {"all-reduce": (1, matrices + scales + embedding + F32)}
    assert evaluation == {"all-reduce": (1, F32)}


def test_fsdp_gathers_parameters_and_adds_up_gradients(cfg):
    """Each matrix is gathered once (on a TPU once more for the backward pass), the embedding for both of its uses; what
    is added up is the gradients.  Activations stay where they are."""
    cfg = replace(cfg, dropout=0.0, fsdp=8)
    step, evaluation = sent(cfg)
    matrices, scales, embedding = sizes(cfg)
    assert evaluation == {"all-gather": (2 + 7 * cfg.n_layer, matrices + embedding), "all-reduce": (1, F32)}
    assert step.keys() == {"all-gather", "all-reduce"}  # a TPU's compiler makes reduce-scatters of the latter
    assert step["all-gather"][1] == matrices + embedding
    of_the_norm = 2 * F32 * (2 + 11 * cfg.n_layer)  # the clip's and the log's: a number per array at most
    assert 0 <= step["all-reduce"][1] - (matrices + scales + embedding + F32) <= of_the_norm


@pytest.mark.parametrize("tensor", [2, 4])
def test_tensor_parallelism_adds_up_twice_a_block(cfg, tensor):
    """Forward: two all-reduces of activations per block, one for the embedding, three numbers a token for the loss, and
    the loss; nothing is gathered."""
    cfg = replace(cfg, dropout=0.0, tensor=tensor)
    _, evaluation = sent(cfg)
    tokens = cfg.batch_size * cfg.block_size * tensor // 8  # of each group of devices that shares them
    activations = F32 * tokens * cfg.n_embd
    assert evaluation.keys() == {"all-reduce"}
    assert evaluation["all-reduce"][1] == (2 * cfg.n_layer + 1) * activations + 3 * F32 * tokens + F32


# --- rematerialisation -----------------------------------------------------------------------------------------------


def test_remat_changes_memory_and_no_number(cfg):
    """The same losses with dropout, in less memory."""
    losses, memory = [], []
    for remat in 0, 1:
        one = replace(cfg, remat=remat, n_layer=3)
        losses.append(run(one, devices=1, n=3)[0])
        memory.append(temporaries(one, devices=1))
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert memory[1] < memory[0]
