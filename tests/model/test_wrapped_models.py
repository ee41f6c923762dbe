"""Models as people hold them: compiled, frozen, adapted, offloaded, quantised. The numbers do not change."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.swa_utils import AveragedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import tracker
from tests.support.models import build
from tests.support.refused import refused
from tests.support.rounding import of_miscouplings

FAMILY = "llama, grouped keys"


@pytest.fixture(scope="module")
def plain():
    model, inputs = build(FAMILY)
    return model, inputs, tracker.measure(model, inputs, k=4)


def measured(model, inputs):
    ds = tracker.measure(model, inputs, k=4)
    assert ds.diagnostics_sliced.all(), ds.attrs["fallbacks"]
    return ds


def compiled_whole(model):
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def with_each_block(model, wrap):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = wrap(layer)
    return model


def compiled_blocks(model):
    return with_each_block(model, compiled_whole)


def compiled_tower(model):
    model.model = compiled_whole(model.model)
    return model


def compiled_parts(model):
    """The final norm among them, which is counted in."""
    layers = model.model.layers
    for holder, name in (
        (model.model, "norm"),
        (layers[0], "mlp"),
        (layers[1], "self_attn"),
        (model, "lm_head"),
    ):
        setattr(holder, name, compiled_whole(getattr(holder, name)))
    return model


def activation_checkpoint_wrappers(model):
    return with_each_block(model, checkpoint_wrapper).train()


def wrapped_at_every_depth(model):
    model = activation_checkpoint_wrappers(compiled_blocks(model))
    model.model = nn.DataParallel(compiled_tower(model).model)
    return AveragedModel(compiled_whole(nn.DataParallel(model)))


def set_up_by_fabric(model):
    return Fabric(accelerator="cpu", devices=1).setup(compiled_whole(model))


def gradient_checkpointing(model):
    model.gradient_checkpointing_enable()
    return model.train()


def frozen(model):
    return model.requires_grad_(False)


def prepared_in_bf16(model):
    """With a forward on the instance that enters autocast, which the measurement leaves."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    return prepared


HELD = [
    compiled_in_place,
    compiled_tower,
    compiled_parts,
    activation_checkpoint_wrappers,
    wrapped_at_every_depth,
    set_up_by_fabric,
    gradient_checkpointing,
    frozen,
    prepared_in_bf16,
]
NOT_RUN = [
    compiled_tower,
    compiled_parts,
    wrapped_at_every_depth,
    set_up_by_fabric,
]


@pytest.mark.parametrize("held", HELD)
def test_the_numbers_are_those_of_the_plain_model(plain, held):
    model, inputs, expected = plain
    model = held(copy.deepcopy(model))
    if held not in NOT_RUN:
        # As after some training: compiled code exists
        model(inputs)
    ds = measured(model, inputs)
    np.testing.assert_array_equal(ds.miscoupling, expected.miscoupling)
    for name in ("blocks", "final_norm_module"):
        assert ds.attrs[name] == expected.attrs[name]
    assert ds.attrs["witness"].startswith("agrees")


class Outer(nn.Module):
    """A model whose part is wrapped: held twice, or run through the wrapper's own attribute."""

    def __init__(self, net, way):
        super().__init__()
        self.net = (
            net
            if way == "held twice"
            else nn.DataParallel(net)
            if way == "module"
            else compiled_whole(net)
        )
        self.fast = compiled_whole(net) if way == "held twice" else None
        self.way = way

    def forward(self, ids):
        if self.way == "held twice":
            return self.fast(ids)
        return getattr(self.net, self.way)(ids) if self.way else self.net(ids)


@pytest.mark.parametrize("way", ["", "held twice", "module", "_orig_mod"])
def test_a_wrapped_part_is_measured_as_without_its_wrapper(plain, way):
    model, inputs, expected = plain
    ds = measured(Outer(copy.deepcopy(model), way), inputs)
    np.testing.assert_array_equal(ds.miscoupling, expected.miscoupling)
    assert ds.attrs["blocks"] == "net.model.layers.0, net.model.layers.1, net.model.layers.2"


def test_blocks_are_named_with_or_without_the_wrappers_own_steps(plain):
    model, inputs, _ = plain
    model = wrapped_at_every_depth(copy.deepcopy(model))
    plain_names = [f"model.layers.{i}" for i in range(3)]
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LlamaDecoderLayer)
    }
    holder = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    container = next(name for name, m in model.named_modules() if m is holder)
    given = [
        plain_names,
        list(found),
        list(found.values()),
        list(holder),
        holder,
        "model.layers",
        container,
    ]
    for blocks in given:
        assert tracker.find_blocks(model, blocks).names == tuple(plain_names)
    spans = [f"input of {name}" for name in found] + [f"output of {list(found)[-1]}"]
    assert (
        tracker.find_blocks(model, spans).names[0]
        == "input of model.layers.0 to input of model.layers.1"
    )
    with refused("no module named 'model._orig_mod.blocks'; its parts are model .LlamaModel"):
        tracker.find_blocks(model, "model._orig_mod.blocks")


def test_a_wrapped_parts_memory_is_counted(plain):
    model, inputs, _ = plain
    costs = [
        tracker.measure(m, inputs, dry_run=True, dtype="float64")
        for m in (model, compiled_tower(copy.deepcopy(model)))
    ]
    assert costs[0].peak_bytes == costs[1].peak_bytes


def test_weights_in_flattened_pieces_are_refused(plain):
    model, inputs, _ = plain
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        sharded = FullyShardedDataParallel(copy.deepcopy(model), device_id=torch.device("cpu"))
        with refused("FSDP 1 keeps weights in flattened pieces"):
            tracker.measure(nn.Sequential(sharded), inputs)
    finally:
        torch.distributed.destroy_process_group()


def test_offloaded_to_disk(plain, tmp_path):
    from accelerate import disk_offload

    model, inputs, expected = plain
    model = copy.deepcopy(model)
    disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    ds = measured(model, inputs)
    np.testing.assert_array_equal(ds.miscoupling, expected.miscoupling)
    assert ds.attrs["witness"].startswith("not asked")


def test_weights_that_were_never_loaded_are_refused():
    with torch.device("meta"):
        model, inputs = build("gpt2")
    with refused("on the meta device"):
        tracker.measure(model, torch.ones(1, 4, dtype=torch.long))


def test_adapters_count_as_part_of_the_model(plain):
    from peft import LoraConfig, get_peft_model

    model, inputs, without = plain
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(model), config)
    seen = measured(adapted, inputs)
    merged = measured(copy.deepcopy(adapted).merge_and_unload(), inputs)
    np.testing.assert_allclose(seen.miscoupling, merged.miscoupling, atol=of_miscouplings(merged))
    assert float(abs(seen.miscoupling - without.miscoupling).max()) > 1e-3


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_blocks_are_measured_dequantised(plain, bits):
    import bitsandbytes as bnb

    make, weight_of = {
        4: (
            partial(bnb.nn.Linear4bit, quant_type="nf4", compute_dtype=torch.float32),
            lambda kept: bnb.functional.dequantize_4bit(kept.data, kept.quant_state),
        ),
        8: (
            partial(bnb.nn.Linear8bitLt, has_fp16_weights=False),
            lambda kept: kept.data.float() * kept.SCB[:, None] / 127,
        ),
    }[bits]
    model, inputs, _ = plain
    quantised, dequantised = copy.deepcopy(model), copy.deepcopy(model)
    for layer, other in zip(quantised.model.layers, dequantised.model.layers, strict=True):
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = getattr(layer.mlp, name)
            swapped = make(linear.in_features, linear.out_features, bias=False)
            swapped.load_state_dict(linear.state_dict())
            setattr(layer.mlp, name, swapped := swapped.to("cpu"))
            getattr(other.mlp, name).weight.data.copy_(weight_of(swapped.weight))
    kinds = {type(m) for m in quantised.modules()}
    seen, expected = (measured(model, inputs) for model in (quantised, dequantised))
    np.testing.assert_allclose(
        seen.miscoupling, expected.miscoupling, atol=of_miscouplings(expected)
    )
    assert {type(m) for m in quantised.modules()} == kinds
    assert swapped.weight.dtype != torch.float32


def test_what_was_assumed_can_be_corrected():
    model, inputs = build("timm vit")
    found = tracker.find_blocks(model)
    for text in (
        "blocks.0 to blocks.2",
        "batch first",
        "final norm: norm (included by default if measuring finds that logits over a vocabulary follow it)",
        "class token: position 0",
    ):
        assert text in str(found)
    assert "unembedding: lm_head; class token: none" in str(tracker.find_blocks(build("gpt2")[0]))
    other = tracker.find_blocks(model, final_norm="norm", unembedding="head", class_token=1)
    assert other.unembedding == "head"
    seen = tracker.measure(model, inputs, blocks=other, final_norm="include", k=4)
    assert seen.attrs["final_norm_module"] == "norm" and (seen.token_position == 1).all()
    with refused("no module named 'norms'"):
        tracker.find_blocks(model, final_norm="norms")
