"""Choose or check the token that stands for the masked slots of a block."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase


def _tokens_in_use(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids that text or the chat template brings up by themselves."""
    template = tokenizer.chat_template or ""
    if isinstance(template, dict):
        template = "".join(template.values())
    special = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    named = {i for i, token in tokenizer.added_tokens_decoder.items() if token.content in template}
    return {i for i in special if isinstance(i, int)} | named


def choose_mask_token(tokenizer: PreTrainedTokenizerBase, embedding_rows: int) -> int:
    """An id that chat text never holds: the tokenizer's own mask token, else the first embedding row past the
    tokenizer's ids, else the highest special token that the chat template does not use.

    Raises:
        ValueError: there is none.
    """
    if isinstance(tokenizer.mask_token_id, int):
        return tokenizer.mask_token_id
    if len(tokenizer) < embedding_rows:
        return len(tokenizer)
    in_use = _tokens_in_use(tokenizer)
    free = [
        i for i, t in tokenizer.added_tokens_decoder.items() if t.special and i not in in_use and i < embedding_rows
    ]
    if not free:
        raise ValueError(
            "mask_token_id=None: the tokenizer has no mask token, no unused embedding row and no unused special token; "
            "give the id of a token that your data never holds"
        )
    return max(free)


def check_mask_token(mask_token_id: int, tokenizer: PreTrainedTokenizerBase, embedding_rows: int) -> None:
    """Raise ValueError when `mask_token_id` is outside the embedding or is a token in use."""
    if not 0 <= mask_token_id < embedding_rows:
        raise ValueError(
            f"mask_token_id={mask_token_id}: outside the target's embedding, which has rows 0..{embedding_rows - 1}"
        )
    in_use = _tokens_in_use(tokenizer)
    ordinary = mask_token_id < len(tokenizer) and mask_token_id not in tokenizer.added_tokens_decoder
    if mask_token_id in in_use or ordinary:
        token = tokenizer.convert_ids_to_tokens(mask_token_id)
        raise ValueError(
            f"mask_token_id={mask_token_id}: this is {token!r}, a token in use; leave it out to have one chosen, or "
            "give an id that text never holds (an unused special token or an embedding row past the tokenizer's ids)"
        )
