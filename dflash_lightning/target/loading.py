"""Load a target: the whole model for a producer, or embedding, LM head and final norm alone for the drafter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from dflash_lightning.target.resolve import resolve_target

# Names under which decoders keep the norm that stands between the last layer and the LM head.
_FINAL_NORM_NAMES = (
    "norm", "final_norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "layer_norm", "embedding_norm",
    "ln_out",
)  # fmt: skip


def check_dtype(option: str, dtype: str | torch.dtype) -> None:
    """Raise ValueError, naming `option`, for what is neither "auto" nor a floating dtype of torch."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype != "auto" and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"{option}={dtype!r}: 'auto' or a torch dtype such as 'bfloat16'")


def _check_device(device: torch.device | str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={str(device)!r} cannot be used: {reason}") from None


def load_model(
    target: str,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    num_layers: int | None = None,
) -> PreTrainedModel:
    """The target as a frozen causal LM in eval mode.

    Args:
        dtype: a torch dtype, its name, or "auto" (as stored).
        num_layers: keep only so many decoder layers; 0 leaves embedding, final norm and LM head, whose tensors alone
            are then read from the safetensors files.

    Raises:
        OSError: the target is no folder, no package and no reachable hub name.
        ValueError: there is no such dtype or device, or the target's files lack weights of the model.
    """
    check_dtype("dtype", dtype)
    _check_device(device)
    name = resolve_target(target)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        kwargs: dict[str, Any] = {"config": config, "dtype": dtype, "trust_remote_code": trust_remote_code}
        if num_layers is not None:
            text_config = config.get_text_config()
            text_config.num_hidden_layers = num_layers
            if getattr(text_config, "layer_types", None):
                text_config.layer_types = text_config.layer_types[:num_layers]
            # Tensors whose size follows the number of layers (Gemma 4's embeddings for each layer) are not used.
            kwargs["ignore_mismatched_sizes"] = num_layers == 0
        if attn_implementation is not None:
            kwargs["attn_implementation"] = attn_implementation
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, **kwargs)
            model, report = loaded
    except OSError as error:
        raise OSError(f"target={target}: cannot load it as a folder, package or hub name: {error}") from error
    _check_complete(target, model, report, num_layers == 0)
    nn.Module.to(model, device)
    return model.eval().requires_grad_(False)


def _check_complete(target: str, model: PreTrainedModel, report: dict[str, Any], head_only: bool) -> None:
    """transformers gives random values to weights that the files lack, with a warning alone."""
    if getattr(model, "hf_quantizer", None) is not None:
        return  # its own tensors come in the place of the model's
    unloaded = {*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])}
    needed = dict(model.named_parameters())
    if head_only:
        head = FrozenHead.of(model)
        parts = (head.embedding, head.lm_head, head.final_norm)
        kept = {id(p) for part in parts if part is not None for p in part.parameters()}
        needed = {name: p for name, p in needed.items() if id(p) in kept}
    if lacking := sorted(unloaded & needed.keys()):
        raise ValueError(f"target={target}: its files hold no fitting values for {', '.join(lacking[:5])}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence load reports: with layers left out on purpose they list every tensor of the model."""
    level = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The module that runs embedding, layers and final norm, without the LM head."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or decoder is model:
        # Llama 4's text model names a prefix that it has no module for.
        decoder = getattr(model, model.base_model_prefix, None) or model.model
    return decoder


def layers_of(decoder: nn.Module, num_layers: int) -> tuple[nn.Module, str]:
    """The owner and attribute name of the decoder's layer list, found by its length.

    Raises:
        ValueError: the decoder holds no list of `num_layers` layers.
    """
    for _, owner in decoder.named_modules():
        for name, child in owner.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == num_layers:
                return owner, name
    raise ValueError(f"{type(decoder).__name__}: found no list of {num_layers} decoder layers to tap")


def final_norm_of(decoder: nn.Module) -> nn.Module | None:
    """The norm after the last layer, or None where it has no known name."""
    for _, module in decoder.named_modules():
        for name in _FINAL_NORM_NAMES:
            norm = getattr(module, name, None)
            if isinstance(norm, nn.Module) and any(isinstance(c, nn.ModuleList) for c in module.children()):
                return norm
    return None


def logit_rule(config: PretrainedConfig) -> tuple[float, float | None]:
    """What a target does to its LM head's output: multiply by the first, then cap softly at the second, if any."""
    text = config.get_text_config()
    scale = 1.0
    # The families name it differently, and one name means a factor in one and a divisor in the other.
    if text.model_type.startswith("cohere"):
        scale = getattr(text, "logit_scale", None)
    elif text.model_type.startswith("granite"):
        scale = 1 / (getattr(text, "logits_scaling", None) or 1.0)
    elif text.model_type.startswith("hyperclovax"):
        scale = getattr(text, "logits_scaling", None)
    elif text.model_type.startswith("falcon_h1"):
        scale = getattr(text, "lm_head_multiplier", None)
    elif text.model_type.startswith("muse"):
        scale = getattr(text, "output_multiplier", None)
    softcap = getattr(text, "final_logit_softcapping", None) or getattr(text, "logits_soft_cap", None)
    return 1.0 if scale is None else float(scale), None if softcap is None else float(softcap)


class FrozenHead:
    """The target's embedding, LM head and final norm, as the model's own modules.

    Not an `nn.Module`, so that a LightningModule that holds one neither saves, trains nor broadcasts target weights.
    """

    def __init__(
        self, embedding: nn.Module, lm_head: nn.Module, final_norm: nn.Module | None, config: PretrainedConfig
    ) -> None:
        self.embedding = embedding
        self.lm_head = lm_head
        self.final_norm = final_norm
        self.logit_scale, self.logit_softcap = logit_rule(config)
        self.device: torch.device = self.weight.device

    @classmethod
    def of(cls, model: PreTrainedModel) -> FrozenHead:
        """The parts of a loaded model. Raises ValueError when it has no LM head."""
        head = model.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(model).__name__} has no LM head")
        return cls(model.get_input_embeddings(), head, final_norm_of(decoder_of(model)), model.config)

    @property
    def weight(self) -> Tensor:
        """LM head weight [V, H]."""
        return self.lm_head.weight  # pyright: ignore[reportReturnType]

    @property
    def bias(self) -> Tensor | None:
        """LM head bias [V], if any."""
        return getattr(self.lm_head, "bias", None)

    def to(self, device: torch.device) -> FrozenHead:
        """Move the modules to `device` (once; later calls cost a comparison)."""
        if self.device != device:
            for module in (self.embedding, self.lm_head, self.final_norm):
                if module is not None:
                    module.to(device)
            self.device = device
        return self


def load_frozen_head(target: str, *, dtype: torch.dtype | str = "auto", trust_remote_code: bool = False) -> FrozenHead:
    """Read only embedding, LM head and final norm of `target`, on the CPU."""
    return FrozenHead.of(load_model(target, dtype=dtype, trust_remote_code=trust_remote_code, num_layers=0))
