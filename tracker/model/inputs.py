"""Turn inputs (prompts, a tensor or a mapping) into forward calls, checked before the model runs.

Prompts are never padded: each has its own forward pass.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as shortened
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from tracker.common.errors import Note, UsageError, warn_caller
from tracker.model.hidden_state import tensors_in
from tracker.model.huggingface import huggingface_owner, token_embedding
from tracker.model.random_numbers import seed_of
from tracker.model.records import describe
from tracker.model.wrappers import unwrap
from tracker.provenance import digest


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of special tokens, as the tokenizer states them, or the model's config where it states none.

    Attributes:
        first: the id of the class token at the beginning of a text, None if it is not stated.
        ends: ids of separator, class and end tokens, which a tokenizer may put at the end of a text.
    """

    first: int | None = None
    ends: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Batch:
    """One forward call of B samples."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    labels: list[str]  # the prompts' texts; empty strings for other inputs
    # (B, n) bool: positions that are not padding, if the caller gave an attention mask
    valid: Tensor | None = None
    token_texts: Sequence[str] = ()  # of a prompt's tokens, if their tokenizer has `decode`
    ids: Tensor | None = None  # (B, n) token ids
    special: SpecialTokens = SpecialTokens()

    def by_sample(self) -> "list[Batch]":
        """Return one forward call for each sample."""
        return [self.part(slice(b, b + 1)) for b in range(len(self.labels))]

    def part(self, samples: slice) -> "Batch":
        """Return the forward call of some samples."""
        arguments, keywords = select_samples(
            (self.arguments, self.keywords), samples, len(self.labels)
        )
        return replace(
            self,
            arguments=arguments,
            keywords=keywords,
            labels=self.labels[samples],
            valid=None if self.valid is None else self.valid[samples],
            ids=None if self.ids is None else self.ids[samples],
        )

    @property
    def divides(self) -> bool:
        """Whether every argument divides into samples, or is a number or text."""

        def divides(value: Any) -> bool:
            if isinstance(value, dict):
                return all(map(divides, value.values()))
            if isinstance(value, (list, tuple)):  # numbers in it may be of a sample each
                return all(map(divides, value)) and all(
                    isinstance(leaf, Tensor) for leaf in tree_leaves(value)
                )
            is_flag = value is None or isinstance(value, (bool, int, float, str))
            return is_flag or (isinstance(value, Tensor) and value.shape[:1] == (len(self.labels),))

        return all(map(divides, (*self.arguments, *self.keywords.values())))

    def of_first_sample(self) -> "Batch":
        """Return the forward call of the first sample alone; the whole call if some argument may not divide into samples."""
        return self.by_sample()[0] if self.divides else self

    def sample_seeds(self, valid: Sequence[Sequence[int]], n: int) -> list[int]:
        """Return a seed for each sample, from its ids or its first tensor, without padding.

        It depends on nothing else in the batch, and not on rounding, as a seed from hidden states would.

        Args:
            valid: the positions of each sample that are not padding.
            n: the number of positions.
        """
        B = len(self.labels)
        tensors = tensors_in((self.ids, self.arguments, self.keywords))
        samples = next((tensor.cpu() for tensor in tensors if tensor.shape[:1] == (B,)), None)
        if samples is None:
            return [0] * B
        # Tokens; several inputs for each where a model downsamples them.
        if samples.dim() > 1 and samples.shape[1] % n == 0:
            samples = [x[:: len(x) // n][at] for x, at in zip(samples, valid, strict=True)]
        return [seed_of([x], {}) for x in samples]

    def sample_digests(self, valid: Sequence[Sequence[int]], n: int) -> list[int]:
        """Return a hash of 63 bits of all tensors that the model receives for each sample, without padding; 0: not known.

        Tensors that do not divide into samples belong to each of them. Arguments as for `sample_seeds`.
        """
        B = len(self.labels)
        tensors = [tensor.cpu() for tensor in tensors_in((self.arguments, self.keywords))]
        if not any(tensor.shape[:1] == (B,) for tensor in tensors):
            return [0] * B

        def of_sample(tensor: Tensor, b: int) -> Tensor:
            if tensor.shape[:1] != (B,):
                return tensor
            by_token = tensor.dim() > 1 and tensor.shape[1] > 0 and tensor.shape[1] % n == 0
            return tensor[b].unflatten(0, (n, -1))[list(valid[b])] if by_token else tensor[b]

        return [
            int(digest([of_sample(tensor, b) for tensor in tensors])[:16], 16) >> 1
            for b in range(B)
        ]


def select_samples(values: Any, samples: slice, B: int) -> Any:
    """Select some of B samples: slice every tensor whose first axis is as long as the batch, nested or not."""
    return tree_map(
        lambda leaf: leaf[samples] if isinstance(leaf, Tensor) and leaf.shape[:1] == (B,) else leaf,
        values,
    )


def batches(model: nn.Module, inputs: Any, tokenizer: Any, max_tokens: Any) -> list[Batch]:
    """Return the forward calls for `inputs`.

    Args:
        model: the model whose forward takes them.
        inputs: one prompt or several, a tensor (batch first), or a mapping of the forward's arguments, which may hold tensors or
            mappings and lists of them; NumPy arrays that the forward does not take are left out. Of a tuple or list that a
            loader yields, the first entry is taken, with a notice.
        tokenizer: of the prompts, a function of a text; it is checked. Of ids it states the special tokens.
        max_tokens: length to which prompts are cut, with a warning; None: prompts are not cut.

    Raises:
        UsageError: for inputs that are empty, too long for the model's context, out of its vocabulary, or of another type,
            for prompts without a tokenizer, for a tokenizer that can't be called, and for a length to which the inputs can't be
            cut.
    """
    model = unwrap(model)
    check_tokenizer(tokenizer)
    if isinstance(inputs, str):
        inputs = [inputs]
    if isinstance(inputs, (tuple, list)) and isinstance(
        next(iter(inputs), None), (Tensor, Mapping)
    ):
        warn_caller(
            f"the inputs are a batch of a training, {describe(inputs)}: its first entry is measured",
            Note,
        )
        inputs = inputs[0]
    max_tokens = _checked_max_tokens(max_tokens, inputs)
    if isinstance(inputs, Tensor):
        calls = [_batch(model, (inputs,), {}, inputs, None, tokenizer)]
    elif isinstance(inputs, Mapping):
        # Of what a tokenizer returns, a dictionary, whose tensors divide into samples
        inputs = {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in inputs.items()
        }
        tensors = _named_tensors(inputs)
        # The mask counts tokens and is none; what else comes first is what the batch axis is read from.
        given = [name for name in tensors if name != "attention_mask"]
        first = next(name for name in ("input_ids", "inputs_embeds", *given) if name in given)
        main = tensors[first]
        if first == "inputs_embeds":
            main = main[..., 0]  # one number for each token, as of ids, whose shape the mask has
        taken = {
            name: value
            for name, value in inputs.items()
            if not isinstance(value, np.ndarray) or _takes(model, name)
        }
        calls = [_batch(model, (), taken, main, tensors.get("attention_mask"), tokenizer)]
    elif isinstance(inputs, Sequence) and all(isinstance(prompt, str) for prompt in inputs):
        if tokenizer is None and inputs:
            raise UsageError(
                "the inputs are prompts; give their tokenizer as well: measure(model, prompts, tokenizer=...)"
            )
        encoded = [_encoded(prompt, i, tokenizer) for i, prompt in enumerate(inputs)]
        encoded = _cut(encoded, max_tokens)
        calls = [_prompt(model, inputs[i], i, tokenizer, encoded[i]) for i in range(len(inputs))]
    else:
        raise UsageError(
            f"inputs of type {type(inputs).__name__} that are no prompts; give a list of prompts with a tokenizer, or a tensor "
            "(batch first; of token ids or an array: torch.as_tensor(inputs)) or mapping that the model's forward takes"
        )
    if not calls or not all(call.labels for call in calls):
        raise UsageError("no inputs: give at least one prompt or sample")
    return calls


def _named_tensors(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a mapping by name; if none is the model's input, those of the mappings and lists in it as well."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    if tensors.keys() - {"attention_mask"}:
        return tensors
    for path, leaf in tree_flatten_with_path(inputs)[0]:
        if isinstance(leaf, Tensor):
            tensors.setdefault(str(getattr(path[-1], "key", keystr(path))), leaf)
    if tensors.keys() - {"attention_mask"}:
        return tensors
    raise UsageError(
        f"the mapping given as inputs holds no tensor for the model, such as input_ids, but {shortened(list(inputs))}"
    )


def check_tokenizer(tokenizer: Any) -> None:
    """Raise UsageError if the tokenizer is given and can't be called, such as the name of one."""
    if tokenizer is not None and not callable(tokenizer):
        name = tokenizer if isinstance(tokenizer, str) else "gpt2"
        raise UsageError(
            f"tokenizer is {shortened(tokenizer)} ({type(tokenizer).__name__}), which can't be called; give the tokenizer "
            f"itself: AutoTokenizer.from_pretrained({name!r})"
        )


def _checked_max_tokens(max_tokens: Any, inputs: Any) -> int | None:
    if max_tokens is None:
        return None
    # A bool is an int, and NumPy's integers are not.
    whole = isinstance(max_tokens, (int, np.integer)) and not isinstance(max_tokens, bool)
    if not whole or max_tokens < 1:
        raise UsageError(f"max_tokens={max_tokens!r}; give a whole number of tokens, at least 1")
    if isinstance(inputs, (Tensor, Mapping)):
        raise UsageError(
            f"max_tokens={max_tokens} cuts prompts, and these inputs are no prompts; leave it out, or cut them: "
            f"inputs[:, :{max_tokens}]"
        )
    return int(max_tokens)


def _encoded(prompt: str, i: int, tokenizer: Any) -> dict[str, Any]:
    if not prompt.strip():
        raise UsageError(f"prompt {i} is empty; every prompt needs at least one token")
    encoded = dict(tokenizer(prompt, return_tensors="pt"))
    if not isinstance(encoded.get("input_ids"), Tensor):
        raise UsageError(
            f"the tokenizer returns {shortened(list(encoded))}; it has to return a mapping with a tensor input_ids (1, tokens)"
        )
    return encoded


def _cut(encoded: list[dict[str, Any]], max_tokens: int | None) -> list[dict[str, Any]]:
    """Cut longer prompts to `max_tokens`, with one warning."""
    lengths = [one["input_ids"].shape[1] for one in encoded]
    long = [i for i, length in enumerate(lengths) if max_tokens is not None and length > max_tokens]
    if long:
        which = f"{len(long)} of {len(encoded)} prompts have up to"
        each = "each is "
        if len(long) == 1:
            which, each = f"prompt {long[0]} has", ""
        warn_caller(
            f"{which} {max(lengths)} tokens; {each}cut to its first {max_tokens} (max_tokens)"
        )
    for i in long:
        encoded[i] = {name: value[:, :max_tokens] for name, value in encoded[i].items()}
    return encoded


def _prompt(
    model: nn.Module, prompt: str, i: int, tokenizer: Any, encoded: dict[str, Any]
) -> Batch:
    ids = encoded["input_ids"]
    try:
        _check_ids(model, ids)
    except UsageError as error:
        raise UsageError(f"prompt {i} ({shortened(prompt)}): {error}") from error
    known = inspect.signature(model.forward).parameters
    if "input_ids" not in known and _takes(model, "input_ids"):
        # A model around the Hugging Face model, to which the keywords go.
        known = inspect.signature((huggingface_owner(model) or model).forward).parameters
    # Some tokenizers return more than their model takes; some forwards have another name for their tokens.
    keywords = {name: value for name, value in encoded.items() if name in known}
    arguments = () if "input_ids" in keywords else (ids,)
    decode = getattr(tokenizer, "decode", None)
    texts = [decode([token]) for token in ids[0].tolist()] if decode else ()
    batch = _batch(model, arguments, keywords, ids, None, tokenizer, [prompt])
    return replace(batch, token_texts=texts, ids=ids, special=_special_tokens(tokenizer))


def _batch(
    model: nn.Module,
    arguments: tuple,
    keywords: dict,
    main: Tensor,
    mask: Any,
    tokenizer: Any,
    labels: list[str] | None = None,
) -> Batch:
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        first = next((name for name in signature.parameters if name not in keywords), "")
        nested = f"{{{first!r}: {{{next(iter(keywords), '')!r}: ...}}}}"
        remedy = f"if {first} is one mapping of them, give {nested}; " if keywords and first else ""
        raise UsageError(
            f"the forward of {type(model).__name__} does not take these inputs: {error}; {remedy}give a mapping of what it takes "
            f"({', '.join(signature.parameters)}) or, in a training, forward=lambda module, batch: ..."
        ) from error
    _check_batch_axis(model, main)
    if not main.is_floating_point():
        _check_ids(model, main)
    valid = mask.bool() if isinstance(mask, Tensor) and mask.shape == main.shape else None
    if valid is not None and not valid.any(1).all():
        raise UsageError(
            "a sample's attention mask leaves no token; every sample needs at least one"
        )
    owner = huggingface_owner(model)
    batch = Batch(arguments, keywords, labels or [""] * len(main), valid)
    if owner is None or main.is_floating_point() or main.dim() > 2:
        return batch
    # Not every config states them
    stated = _special_tokens(tokenizer)
    return replace(
        batch, ids=main, special=stated if stated.ends else _special_tokens(owner.config)
    )


def _check_batch_axis(model: nn.Module, main: Tensor) -> None:
    if main.dim() < 2:
        raise UsageError(
            f"inputs of shape {tuple(main.shape)}; the first axis must be the batch: add it with [None]"
        )
    layer_types = nn.Linear, nn.Embedding, _ConvNd
    layers = (entry for entry in model.named_modules() if isinstance(entry[1], layer_types))
    name, first = next(layers, ("", None))
    if main.dim() != 3 or not isinstance(first, nn.Conv2d) or first.in_channels != len(main):
        return
    # (1, height, width) may also be a batch of one spectrogram, to which the model adds the channel (AST).
    if len(main) > 1 or getattr(huggingface_owner(model), "main_input_name", "") == "pixel_values":
        raise UsageError(
            f"inputs of shape {tuple(main.shape)}, a single image without a batch axis: the model's first layer ({name}) takes "
            f"(batch, {len(main)}, height, width). Add the axis with [None]: measure(model, image[None])"
        )


def _takes(model: nn.Module, name: str) -> bool:
    """Whether the forward takes a keyword of this name."""
    known = inspect.signature(model.forward).parameters
    return name in known or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()
    )


def _special_tokens(stated_by: Any) -> SpecialTokens:
    """Read the ids of special tokens from a tokenizer or a config; those that it does not state are left out."""
    first = getattr(stated_by, "cls_token_id", None)
    ends: set[int] = set()
    for kind in ("cls", "sep", "eos"):
        ids = getattr(stated_by, f"{kind}_token_id", None)
        # Configs of some models list several ends of a text.
        several = ids if isinstance(ids, list) else [ids]
        ends |= {one for one in several if isinstance(one, int)}
    return SpecialTokens(first, frozenset(ends))


def _check_ids(model: nn.Module, ids: Tensor) -> None:
    model = huggingface_owner(model) or model
    config = getattr(model, "config", None)
    table, context = token_embedding(model), getattr(config, "max_position_embeddings", None)
    if ids.shape[1] == 0:
        raise UsageError("no tokens; every prompt needs at least one")
    if context is not None and ids.shape[1] > context > 0:  # XLNet's -1 means no limit
        raise UsageError(
            f"{ids.shape[1]} tokens, more than the model's context of {context}; shorten the input, or cut prompts with "
            f"max_tokens={context} (on a command line --max_tokens {context})"
        )
    window = getattr(config, "attention_window", None)  # Longformer, LED
    multiple = max(window) if isinstance(window, (list, tuple)) else window
    if isinstance(multiple, int) and multiple > 0 and ids.shape[1] % multiple:
        raise UsageError(
            f"{ids.shape[1]} tokens, which this model pads to a multiple of its attention window ({multiple}), so that "
            f"padding would be measured; give a multiple of {multiple} tokens"
        )
    if table is None or not ids.numel():
        return
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= table.num_embeddings:
        raise UsageError(
            f"token ids from {least} to {most}, but the model's vocabulary has {table.num_embeddings} "
            "entries; is this the model's own tokenizer?"
        )
