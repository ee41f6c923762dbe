"""Every transformer of vit-pytorch and x-transformers that builds tiny: measured, or refused with lines that are then tried.

`python -m tests.sweep.of_packages` prints what became of each class, and the counts. The exit status is 1 if a `blocks=` line
that a message proposes fails, or if `measure` raises anything but a UsageError.
"""

import argparse
import ast
import collections
import importlib
import inspect
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import tracker
from tests.sweep.catalogue import ids, last_line
from tracker.common.errors import UsageError

MEASURED = "measured"
WITH_LINE = "measured with the proposed line"
REFUSED = "refused"
NOT_BUILT = "not built"
LINE_FAILED, RAISED = "the proposed line failed", "raw exception"
OUTCOMES = (MEASURED, WITH_LINE, REFUSED, LINE_FAILED, RAISED, NOT_BUILT)
FAULTS = (LINE_FAILED, RAISED)
PACKAGES = ("vit_pytorch", "x_transformers")

WIDTH, DEPTH = 32, 3
# What a class takes under these names, unless `SPECIAL` says otherwise.
ARGUMENTS: dict[str, Any] = {
    "dim": WIDTH, "depth": DEPTH, "heads": 2, "dim_head": 16, "attn_dim_head": 16, "mlp_dim": 64, "mlp_mult": 2,
    "image_size": 32, "patch_size": 8, "image_patch_size": 8, "frame_patch_size": 2, "frames": 4, "max_frames": 4,
    "num_classes": 5, "num_tokens": 40, "max_seq_len": 32, "seq_len": 32, "spatial_depth": DEPTH, "temporal_depth": DEPTH,
    "cls_depth": 2, "dec_depth": DEPTH, "enc_depth": 2, "dec_head_depth": 2, "dec_tail_depth": 2, "ndim": 2,
    "input_shape": (32, 32), "dim_in": 8, "dim_out": 8, "max_tokens_per_depth": (8, 6, 4), "num_residual_streams": 2,
    "use_flash": True, "specialize_qkv_depth": 1, "num_slots": 3, "dim_action": 4, "h_s": 3, "w_s": 3,
}  # fmt: skip
# Given also where the default is None
SIZES = ("depth", "heads", "mlp_dim", "image_size", "patch_size")
# A class without any of these parameters is a layer.
WHOLE = {
    "depth",
    "image_size",
    "seq_len",
    "input_shape",
    "attn_layers",
    "net",
    "vit",
    "encoder",
    "decoder",
    "enc_depth",
}
WHOLE |= {"dec_depth", "dec_head_depth", "embedding_dim", "dims", "s1_emb_dim", "forward_decoder"}
LAYERS = {
    "LayerScale",
    "DynamicPositionBias",
    "NetWrapper",
    "EpisodicMemories",
    "AutoencodingHead",
    "ResidualDynamics",
}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


# Tried in this order, until the forward takes one.
INPUTS: list[Any] = [
    random(2, 3, 32, 32), ids(2, 9), random(2, 9, WIDTH), random(2, 4, WIDTH), random(2, 9, 8), random(2, 3, 4, 32, 32),
    random(2, 3, 32), random(2, WIDTH, 8, 8), random(1, 3, 32, 32), random(2, 3, 64, 64),
]  # fmt: skip


def of(path: str, *arguments: Any, **named: Any) -> nn.Module:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)(*arguments, **named)


def vit(cls: str = "vit_pytorch.vit.ViT") -> nn.Module:
    names = (
        "image_size",
        "patch_size",
        "num_classes",
        "dim",
        "depth",
        "heads",
        "mlp_dim",
        "dim_head",
    )
    return of(cls, **{name: ARGUMENTS[name] for name in names})


def stack() -> nn.Module:
    return of("vit_pytorch.vit.Transformer", WIDTH, DEPTH, 2, 16, 64)


def layers(cls: str = "Decoder", **options: Any) -> nn.Module:
    return of(f"x_transformers.{cls}", dim=WIDTH, depth=DEPTH, heads=2, attn_dim_head=16, **options)


def language_model(cls: str = "Decoder", **options: Any) -> nn.Module:
    return of(
        "x_transformers.TransformerWrapper",
        num_tokens=40,
        max_seq_len=32,
        attn_layers=layers(cls, verbose=False, **options),
    )


def made(cls: type, name: str) -> Any:
    """A module that a class takes as an argument."""
    if name == "attn_layers":
        return layers("Encoder" if cls.__name__.startswith("Vi") else "Decoder")
    return language_model() if cls.__module__.startswith("x_transformers") else vit()


STAGES = {"dim": (16, 32, 32, 32), "depth": (1, 1, 3, 1)}
CONVOLUTIONS = {"num_layers": DEPTH, "num_heads": 2, "embedding_dim": WIDTH, "mlp_ratio": 2.0}
CROSS = {"cross_attn_heads": 2, "cross_attn_depth": 2, "sm_dim": 32, "lg_dim": 48}
TWO_SCALES = [random(2, 9, 32), random(2, 5, 48)]
# By class: arguments, and the forward's arguments where none of INPUTS will do.
SPECIAL: dict[str, tuple[dict[str, Any], list[Any] | None]] = {
    "vit_pytorch.accept_video_wrapper.AcceptVideoWrapper": ({"image_net": vit}, None),
    "vit_pytorch.cct.CCT": ({"img_size": 32, "n_conv_layers": 1, **CONVOLUTIONS}, None),
    "vit_pytorch.cct_3d.CCT": (
        {"img_size": 32, "num_frames": 4, "n_conv_layers": 1, "frame_kernel_size": 3, **CONVOLUTIONS}, None
    ),
    "vit_pytorch.cct.TransformerClassifier": ({"sequence_length": 9, **CONVOLUTIONS}, [random(2, 9, WIDTH)]),
    "vit_pytorch.cct_3d.TransformerClassifier": ({"sequence_length": 9, **CONVOLUTIONS}, [random(2, 9, WIDTH)]),
    "vit_pytorch.cross_vit.CrossViT": (
        {"depth": 2, "sm_patch_size": 8, "lg_patch_size": 16, "sm_enc_depth": 2, "lg_enc_depth": 2, "sm_enc_heads": 2,
         "lg_enc_heads": 2, "sm_enc_mlp_dim": 64, "lg_enc_mlp_dim": 64, **CROSS}, None,
    ),
    "vit_pytorch.cross_vit.CrossTransformer": ({"sm_dim": 32, "lg_dim": 48, "dropout": 0.0}, TWO_SCALES),
    "vit_pytorch.cross_vit.MultiScaleEncoder": (
        {side: {"depth": 2, "heads": 2, "mlp_dim": 64, "dim_head": 16} for side in ("sm_enc_params", "lg_enc_params")}
        | CROSS | {"depth": 2}, TWO_SCALES,
    ),
    "vit_pytorch.crossformer.CrossFormer": (
        STAGES | {"dim": (64, 64, 64, 64), "global_window_size": (4, 2, 2, 1), "local_window_size": 1}, None
    ),
    "vit_pytorch.crossformer.Transformer": ({"global_window_size": 2, "local_window_size": 2}, [random(2, WIDTH, 8, 8)]),
    "vit_pytorch.cvt.CvT": ({"s1_emb_dim": 16, "s2_emb_dim": 32, "s3_emb_dim": 32, "s3_depth": 3}, None),
    "vit_pytorch.cvt.Transformer": ({"proj_kernel": 3, "kv_proj_stride": 2}, None),
    "vit_pytorch.distill.DistillableT2TViT": ({"t2t_layers": ((3, 2), (3, 2)), "channels": 3}, None),
    "vit_pytorch.distill.DistillWrapper": (
        {"teacher": lambda: vit(), "student": lambda: vit("vit_pytorch.distill.DistillableViT")},
        [random(2, 3, 32, 32), torch.tensor([0, 1])],
    ),
    "vit_pytorch.efficient.ViT": ({"transformer": stack}, None),
    "vit_pytorch.distill.DistillableEfficientViT": ({"transformer": stack}, None),
    "vit_pytorch.levit.LeViT": ({"dim": (32, 48), "depth": 2, "stages": 2, "image_size": 64}, [random(2, 3, 64, 64)]),
    "vit_pytorch.levit.Transformer": ({"fmap_size": 8, "dim_key": 8, "dim_value": 8}, None),
    "vit_pytorch.look_vit.LookViT": ({"highres_patch_size": 8, "patch_size": 16, "cross_attn_heads": 2}, None),
    "vit_pytorch.looped_vit.LoopedViT": (
        {"pre_loop_depth": 2, "num_looped_blocks": 2, "post_loop_depth": 2, "loop_depth": 2}, None
    ),
    "vit_pytorch.mae.MAE": ({"decoder_dim": WIDTH}, None),
    "vit_pytorch.max_vit.MaxViT": ({"dim": 16, "depth": (1, 2), "window_size": 4, "dim_conv_stem": 8}, None),
    "vit_pytorch.max_vit_with_registers.MaxViT": (
        {"dim": 16, "depth": (1, 2), "window_size": 4, "dim_conv_stem": 8}, None
    ),
    "vit_pytorch.mobile_vit.MobileViT": (
        {"dims": [16, 24, 32], "channels": [8, 8, 12, 12, 12, 16, 16, 16, 16, 16, 32], "image_size": (64, 64),
         "patch_size": (2, 2)},
        [random(2, 3, 64, 64)],
    ),
    "vit_pytorch.mobile_vit.MobileViTBlock": ({"channel": 3, "kernel_size": 3, "patch_size": (2, 2)}, None),
    "vit_pytorch.mobile_vit.Transformer": ({}, [random(2, 4, 9, WIDTH)]),
    "vit_pytorch.mp3.MP3": ({"vit": lambda: vit("vit_pytorch.mp3.ViT"), "masking_ratio": 0.5}, None),
    "vit_pytorch.nest.NesT": ({"num_hierarchies": 2, "block_repeats": (2, 2), "patch_size": 4}, None),
    "vit_pytorch.nest.Transformer": ({"seq_len": 64}, [random(2, WIDTH, 8, 8)]),
    "vit_pytorch.pit.PiT": ({"depth": (2, 3), "patch_size": 8}, None),
    "vit_pytorch.regionvit.RegionViT": (STAGES | {"window_size": 2, "local_patch_size": 4}, [random(2, 3, 64, 64)]),
    "vit_pytorch.regionvit.R2LTransformer": ({"window_size": 2}, [random(2, WIDTH, 8, 8), random(2, WIDTH, 4, 4)]),
    "vit_pytorch.scalable_vit.ScalableViT": (
        {"dim": 16, "depth": (1, 2), "heads": (2, 2), "reduction_factor": (2, 1), "window_size": (4, None)}, None
    ),
    "vit_pytorch.scalable_vit.Transformer": ({"iwsa_window_size": 4}, None),
    "vit_pytorch.sep_vit.SepViT": (
        {"dim": 16, "depth": (1, 2), "heads": (2, 2), "window_size": 7}, [random(2, 3, 56, 56)]
    ),
    "vit_pytorch.sep_vit.Transformer": ({}, [random(2, WIDTH, 14, 14)]),
    "vit_pytorch.simple_vit_with_relative_proj_pos_bias.Transformer": ({}, [random(2, 4, 4, WIDTH)]),
    "vit_pytorch.simple_vit_with_fft.SimpleViT": ({"freq_patch_size": 8}, None),
    "vit_pytorch.simple_vit_with_sparse_gating.Transformer": ({"dim_mask": 4, "num_register_tokens": 0}, None),
    "vit_pytorch.t2t.T2TViT": ({"t2t_layers": ((3, 2), (3, 2))}, None),
    "vit_pytorch.twins_svt.TwinsSVT": (
        {f"s{i}_{name}": size for i in (1, 2, 3, 4) for name, size in (
            ("local_patch_size", 1), ("global_k", 1), ("emb_dim", 32))},
        [random(2, 3, 64, 64)],
    ),
    "vit_pytorch.twins_svt.Transformer": ({"local_patch_size": 4, "global_k": 2}, None),
    "vit_pytorch.vat_siglip.SigLIPVAT": (
        {f"siglip_{name}": size for name, size in (
            ("image_size", 32), ("patch_size", 8), ("dim", 32), ("depth", DEPTH), ("heads", 2), ("mlp_dim", 64))}, None,
    ),
    "vit_pytorch.na_vit.NaViT": ({}, [[random(3, 32, 32), random(3, 16, 32)]]),
    "x_transformers.neo_mlp.NeoMLP": ({"dim_hidden": 4, "dim_model": 32}, [random(2, 8)]),
    "x_transformers.x_transformers.XTransformer": (
        {f"{side}_{name}": size for side in ("enc", "dec") for name, size in (
            ("num_tokens", 40), ("depth", DEPTH), ("heads", 2), ("max_seq_len", 32))}, [ids(2, 9), ids(2, 7)],
    ),
    "x_transformers.x_transformers.CrossAttender": ({}, [random(2, 9, WIDTH), random(2, 5, WIDTH)]),
    "x_transformers.multi_input.MultiInputTransformerWrapper": ({"num_tokens": {"note": 40}}, [{"note": ids(2, 9)}]),
    "x_transformers.xval.XValTransformerWrapper": ({"numerical_token_id": 3}, [ids(2, 9), random(2, 9)]),
    "x_transformers.belief_state_wrapper.BeliefStateWrapper": ({"forward_decoder": language_model}, None),
    "x_transformers.recirculation.Recirculation": ({"source_layer": 1, "destination_layer": 0}, None),
    "x_transformers.nonautoregressive_wrapper.NonAutoregressiveWrapper": (
        {"net": lambda: language_model("Encoder"), "mask_id": 1}, [ids(2, 32)]
    ),
    "x_transformers.entropy_based_tokenizer.EntropyBasedTokenizer": (
        {"decoder": language_model, "entropy_threshold": 3.0}, None
    ),
    "x_transformers.continuous.ContinuousAutoregressiveWrapper": (
        {"net": lambda: of("x_transformers.ContinuousTransformerWrapper", attn_layers=layers(), dim_in=8, dim_out=8,
                           max_seq_len=32)}, [random(2, 9, 8)],
    ),
    "x_transformers.xval.XValAutoregressiveWrapper": (
        {"net": lambda: of("x_transformers.xval.XValTransformerWrapper", num_tokens=40, max_seq_len=32,
                           numerical_token_id=3, attn_layers=layers())}, [ids(2, 9), random(2, 9)],
    ),
}  # fmt: skip
# Of x-transformers' attention layers, which are one class with many forms: a Decoder in a language model for each.
OPTIONS: list[dict[str, Any]] = [
    *({name: True} for name in (
        "use_scalenorm", "use_rmsnorm", "alibi_pos_bias", "rel_pos_bias", "dynamic_pos_bias", "rotary_pos_emb",
        "polar_pos_emb", "weight_tie_layers", "residual_attn", "macaron", "pre_and_post_norm",
        "gate_residual", "orthog_residual", "mv_split_residual", "scale_residual", "sandwich_norm", "softclamp_output",
        "use_layerscale", "unet_skips", "integrate_layers", "reinject_input", "add_value_residual", "only_attn",
        "ff_glu", "attn_gate_values", "attn_qk_norm", "attn_flash", "depth_scale_residual", "zero_init_branch_output",
    )),
    {"pre_norm": False}, {"pre_norm_has_final_norm": False}, {"shift_tokens": 1}, {"num_residual_streams": 4},
    {"gated_multi_residual": True, "num_residual_streams": 2, "residual_fn_kwargs": {"read_gate_rank": 4}},
    {"sandwich_coef": 1}, {"par_ratio": 2}, {"attn_kv_heads": 1}, {"softclamp_output": True, "rotary_pos_emb": True},
    {"layers_execute_order": (0, 1, 0, 1, 2, 3)}, {"custom_layers": ("a", "f", "a", "f")}, {"attn_num_mem_kv": 2},
    {"attn_aggregated_residuals": True, "attn_aggregated_residual_kwargs": {"lora_rank": 4}},
]  # fmt: skip


def builders() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Return the name of every transformer, and what builds it."""
    for package in PACKAGES:
        folder = importlib.import_module(package).__path__
        for info in pkgutil.iter_modules(folder, f"{package}."):
            try:
                module = importlib.import_module(info.name)
            except ImportError as error:
                print(f"{NOT_BUILT:32} {info.name}: {error}")
                continue
            for name, cls in vars(module).items():
                if (
                    inspect.isclass(cls)
                    and issubclass(cls, nn.Module)
                    and cls.__module__ == info.name
                ):
                    path = f"{info.name}.{name}"
                    if name not in LAYERS and (path in SPECIAL or WHOLE & set(parameters(cls))):
                        yield path, lambda cls=cls, path=path: build(cls, path)
    for options in OPTIONS:
        shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
        yield f"x_transformers.Decoder({shown})", lambda options=options: language_model(**options)


def parameters(cls: type) -> dict[str, inspect.Parameter]:
    """The parameters of a class's constructor, those of its bases included if it passes on any others."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if base is nn.Module or "__init__" not in vars(base):
            continue
        own = inspect.signature(base.__init__).parameters  # type: ignore[misc]
        found = dict(own) | found
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values()):
            break
    return found


def build(cls: type, path: str) -> nn.Module:
    given, _ = SPECIAL.get(path, ({}, None))
    arguments = {name: value() if callable(value) else value for name, value in given.items()}
    for name, parameter in parameters(cls).items():
        if name in arguments:
            continue
        if name in ARGUMENTS and (parameter.default is not None or name in SIZES):
            arguments[name] = ARGUMENTS[name]
        elif name in WHOLE and parameter.default is parameter.empty:
            arguments[name] = made(cls, name)
    return cls(**arguments)


def judge(path: str, make: Callable[[], nn.Module]) -> tuple[str, str]:
    """Return the outcome of a class, and what `measure` says."""
    torch.manual_seed(0)
    try:
        model = make().double().eval()
        inputs = accepted(model, SPECIAL.get(path, ({}, None))[1])
    except Exception as error:
        return NOT_BUILT, last_line(error)
    try:
        return MEASURED, measured(model, inputs)
    except UsageError as error:
        message = str(error)
    except Exception as error:
        return RAISED, last_line(error)
    lines = proposed(message)
    if not lines:
        return REFUSED, message
    failures = []
    for line in lines:
        try:
            measured(
                model,
                inputs,
                blocks=eval(line, {"find_blocks": tracker.find_blocks, "model": model}),
            )
        except Exception as error:
            failures.append(f"{line}: {last_line(error)}")
    if failures:
        return LINE_FAILED, f"{len(failures)} of {len(lines)} lines; {failures[0]}"
    return WITH_LINE, "; ".join(lines)


def measured(model: nn.Module, inputs: Any, **keywords: Any) -> str:
    return tracker.measure(model, inputs, k=2, dtype="float64", **keywords).attrs["blocks"]


def accepted(model: nn.Module, given: list[Any] | None) -> Any:
    """The first input that the model runs on, as `measure` takes it."""
    names = [
        name
        for name, p in inspect.signature(model.forward).parameters.items()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    failure: Exception | None = None
    for arguments in [given] if given else [[one] for one in INPUTS]:
        arguments = [
            value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
            for value in arguments
        ]
        try:
            with torch.no_grad():
                model(*arguments)
            one = arguments[0]
            return (
                one
                if len(arguments) == 1 and isinstance(one, Tensor)
                else dict(zip(names, arguments, strict=False))
            )
        except Exception as error:
            failure = failure or error
    assert failure is not None
    raise failure


def proposed(message: str) -> list[str]:
    """The `blocks=` arguments in a message that can be evaluated; a placeholder such as 'path.to.list' is none."""
    found = []
    for line in message.splitlines():
        for start in (
            i + len("blocks=") for i in range(len(line)) if line.startswith("blocks=", i)
        ):
            for end in range(len(line), start, -1):
                text = line[start:end].partition(" or blocks=")[0].partition("  #")[0].strip()
                try:
                    ast.parse(text, mode="eval")
                except SyntaxError:
                    continue
                if text and "path.to.list" not in text and "..." not in text:
                    found.append(text)
                break
    return found


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep.of_packages", description=__doc__)
    parser.add_argument("--only", default="", help="classes whose names contain this")
    parser.add_argument("--whole", action="store_true", help="messages in full")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    outcomes: dict[str, collections.Counter] = {
        package: collections.Counter() for package in PACKAGES
    }
    for path, make in builders():
        if given.only in path:
            outcome, detail = judge(path, make)
            outcomes[path.partition(".")[0]][outcome] += 1
            detail = detail if given.whole else " ".join(detail.split())[:300]
            print(f"{outcome:32} {path}: {detail}", flush=True)
    print(f"\n{'':32} {PACKAGES[0]:>12} {PACKAGES[1]:>16}")
    for outcome in OUTCOMES:
        print(
            f"{outcome:32} {outcomes[PACKAGES[0]][outcome]:12} {outcomes[PACKAGES[1]][outcome]:16}"
        )
    return int(any(found[outcome] for found in outcomes.values() for outcome in FAULTS))


if __name__ == "__main__":
    sys.exit(main())
