"""The classes to sweep, and how each is built tiny with an input for it."""

import copy
import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto as auto

from tests.support.draws import integers, normal, seeded
from tests.sweep import tiny

TOKENS, PROMPTS = 9, (40, 23)
PARAMETERS = 30_000_000
MULTIMODAL = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES")
ENCODERS = ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES")
VISION = ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_IMAGE_MAPPING_NAMES")
GROUPS = ("causal", "multimodal", "encoder", "vision", "timm")


class NotBuilt(Exception):
    """No tiny model of this class, or it does not run by itself; the message says why."""


@dataclass
class Built:
    """A model in float64 where it runs so, its input, and what is known of it without the tracker."""

    model: nn.Module
    inputs: dict[str, Tensor]
    text: bool
    depth: int | None = None  # layers of the tower that ends in the output
    # Token ids, each for a forward call of its own
    prompts: list[Tensor] = field(default_factory=list)
    dtype: torch.dtype = torch.float64
    note: str = ""

    def fresh(self) -> nn.Module:
        """A copy in eval mode that keeps no cache."""
        model = copy.deepcopy(self.model).eval()
        for module in model.modules():
            config = getattr(module, "config", None)
            if hasattr(config, "use_cache"):
                config.use_cache = False
        return model


def classes(group: str) -> list[str]:
    """The names of a group's classes, each in one group."""
    if group == "timm":
        from tests.sweep import of_timm

        return of_timm.names()
    causal = _of("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES") | {n for n in dir(transformers) if _causal(n)}
    multimodal = _of(*MULTIMODAL) - causal
    encoder = _of(*ENCODERS) - causal - multimodal
    known = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | set(
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    )
    known |= {kind for mapping in MULTIMODAL for kind in getattr(auto, mapping)}
    bases = {
        name
        for kind, name in auto.MODEL_MAPPING_NAMES.items()
        if kind not in known and isinstance(name, str)
    }
    encoder |= {name for name in bases if _main_input(name) == "input_ids"} - causal - multimodal
    vision = _of(*VISION) | {name for name in bases if _main_input(name) == "pixel_values"}
    vision |= {
        n for n in dir(transformers) if n.endswith(("VisionModel", "VisionModelWithProjection"))
    }
    vision -= encoder | causal | multimodal
    return sorted(
        {"causal": causal, "multimodal": multimodal, "encoder": encoder, "vision": vision}[group]
    )


def _of(*mappings: str) -> set[str]:
    values = [value for mapping in mappings for value in getattr(auto, mapping).values()]
    return {name for value in values for name in ([value] if isinstance(value, str) else value)}


def _causal(name: str) -> bool:
    return name.endswith(("ForCausalLM", "LMHeadModel")) and not name.startswith("AutoModel")


def _main_input(name: str) -> str:
    """What the forward of a class takes: token ids or an image, or neither."""
    try:
        cls = getattr(transformers, name)
        known = inspect.signature(cls.forward).parameters
    except (ImportError, AttributeError):
        return ""
    order = [str(cls.main_input_name), "input_ids", "pixel_values"]
    found = next((entry for entry in order if entry in known), "")
    return "pixel_values" if not found and "grid_thw" in known else found


def builder(name: str, group: str) -> Callable[[], Built]:
    """What builds a class; it raises `NotBuilt` where that fails."""
    if group == "timm":
        from tests.sweep import of_timm

        return lambda: of_timm.build(name)
    return lambda: of_transformers(name, group)


def of_transformers(name: str, group: str) -> Built:
    """A transformers class from its tiny configuration."""
    text = group != "vision"
    try:
        cls = getattr(transformers, name)
        config = tiny.tiny(cls.config_class, tiny.DEPTH if text else tiny.OTHER_DEPTH)
        config = tiny.for_class(name, config)
        with torch.device("meta"):
            sizes = {key: p.numel() for key, p in cls(config).named_parameters()}
    except Exception as error:
        raise NotBuilt(f"no tiny configuration: {last_line(error)}") from error
    if (parameters := sum(sizes.values())) > PARAMETERS:
        largest = max(sizes, key=sizes.__getitem__)
        raise NotBuilt(
            f"no tiny configuration: {parameters / 1e6:.0f} M parameters, most in {largest}"
        )

    def make():
        return cls(copy.deepcopy(config))

    depth = _depth(config, text, name.endswith("EncoderModel"))
    try:
        return finished(make, lambda model: _inputs(model, config, text, not text), text, depth)
    except NotBuilt as error:
        known = inspect.signature(cls.forward).parameters
        if not {"input_ids", "pixel_values"} <= known.keys():
            raise
        try:  # with text and images both: towers side by side, or one behind the other
            built = finished(make, lambda model: _inputs(model, config, True, True), True, None)
        except NotBuilt:
            raise error from None
        built.note = "text and images given" + built.note
        return built


def finished(
    make: Callable[[], nn.Module],
    inputs: Callable[[nn.Module], dict[str, Tensor]],
    text: bool,
    depth: int | None,
) -> Built:
    """The model with norms and biases away from their neutral start, once it has run by itself.

    It is tried in float64 and in float32, with much and with little noise on its weights.
    """
    failures = []
    for dtype, spread in ((torch.float64, 0.1), (torch.float64, 0.02), (torch.float32, 0.02)):
        try:
            torch.manual_seed(0)
            model = make().to(dtype)
            generator = seeded(2)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.is_floating_point():
                        parameter.add_(
                            spread * torch.randn(parameter.shape, generator=generator).to(dtype)
                        )
            if hasattr(getattr(model, "config", None), "_experts_implementation"):
                model.set_experts_implementation("eager")  # type: ignore[operator] # the grouped kernels know no float64
            given = {
                k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs(model).items()
            }
            built = Built(model, given, text, depth, dtype=dtype)
            with torch.no_grad():
                out = built.fresh()(**given)
            from tests.sweep.oracle import floats

            if any(value.isnan().any() or (value == torch.inf).any() for value in floats(out)):
                failures.append("its output is not finite")
                continue
            if dtype == torch.float32:
                built.note = "in float32: " + failures[0]
            if text and list(given) == ["input_ids"]:
                built.prompts = [ids(1, length, seed=length) for length in PROMPTS]
                with torch.no_grad():
                    try:
                        for prompt in built.prompts:
                            built.fresh()(prompt)
                    except Exception as error:
                        built.prompts, built.note = (
                            [],
                            built.note + f"; does not run on {PROMPTS} tokens: {last_line(error)}",
                        )
            return built
        except Exception as error:
            failures.append(last_line(error))
    raise NotBuilt("does not run by itself: " + failures[0])


def ids(samples: int, length: int, seed: int = 1) -> Tensor:
    return integers(3, 40, samples, length, seed=seed)


def _inputs(model: nn.Module, config: Any, text: bool, images: bool) -> dict[str, Tensor]:
    known = inspect.signature(model.forward).parameters
    given = {}
    if "input_ids" in known and text:
        given["input_ids"] = ids(2, TOKENS)
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in known:
            given["decoder_input_ids"] = ids(2, TOKENS, seed=3)
    if "pixel_values" in known and images:
        given["pixel_values"] = pixels(config)
    return given | tiny.further_inputs(known, config, given)


def pixels(config: Any) -> Tensor:
    holder = getattr(config, "vision_config", None) or config
    side = getattr(holder, "image_size", tiny.PIXELS)
    height, width = (side, side) if isinstance(side, int) else tuple(side)[-2:]
    shape = (2, getattr(holder, "num_channels", 3), height, width)
    if type(getattr(holder, "num_frames", None)) is int:
        shape = (2, holder.num_frames, *shape[1:])
    return normal(*shape)


def _depth(config: Any, text: bool, encoder: bool) -> int | None:
    if text:
        for name in ("decoder_layers", "num_decoder_layers"):
            if type(getattr(config, name, None)) is int and not encoder:
                return getattr(config, name)
        part = config.get_text_config(decoder=not encoder, encoder=encoder)
    else:
        part = getattr(config, "vision_config", None) or config
    depths = getattr(part, "depths", None)
    if isinstance(depths, (list, tuple)):
        return sum(depths)
    # A block of LongCat holds two attentions, and its config counts those.
    twice = ("num_layers",) if type(part).__name__ == "LongcatFlashConfig" else ()
    for name in (*twice, "num_hidden_layers", "num_layers", "depth"):
        if type(getattr(part, name, None)) is int:
            return getattr(part, name)
    return None


def last_line(error: BaseException) -> str:
    """An exception's message in one line, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}: {' '.join(str(error).split())[:160]}"
