# ruff: noqa: RUF001  (the marks of the DeepSeek family)
"""Chat templates of the known families in reduced form, written for these tests, and tiny tokenizers to hold them."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

# Think blocks only on the turns behind the last user message, an empty one when there is no reasoning.
QWEN3 = """
{%- set ns = namespace(last=0) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
  {%- set content = m.content -%}
  {%- if m.role == 'assistant' -%}
    {%- set reasoning = '' -%}
    {%- if m.reasoning_content is defined -%}
      {%- set reasoning = m.reasoning_content -%}
    {%- elif '</think>' in content -%}
      {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if loop.index0 > ns.last and (loop.last or reasoning) -%}
      {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}
    {%- else -%}
      {{- content -}}
    {%- endif -%}
    {%- for call in m.tool_calls or [] -%}
      {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {{- (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- elif m.role == 'tool' -%}
    {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""

# As above, but thinking by default: the generation prompt opens the block. Refuses conversations without a user.
QWEN35 = (
    "{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 -%}"
    "{{- raise_exception('No user query found in messages.') -}}{%- endif -%}"
    "{%- if messages[0].role == 'assistant' -%}{{- raise_exception('No user query found in messages.') -}}{%- endif -%}"
    + QWEN3.replace("(loop.last or reasoning)", "true").replace(
        "<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}\n{%- endif -%}",
        "<think>\\n\\n</think>\\n\\n' -}}{%- else -%}{{- '<think>\\n' -}}{%- endif -%}\n{%- endif -%}",
    )
)

LLAMA3 = """{{ bos_token }}{% for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

GEMMA = """{{ bos_token }}{%- if messages[0].role == 'system' -%}
{%- set first = messages[0].content + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first = '' -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for m in loop_messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}
{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (first if loop.first else '') }}
{{- m.content | trim }}{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""

# No generation prompt; the system message stands in the last user message, so that earlier turns are rewritten.
MISTRAL = """{{ bos_token }}{%- set ns = namespace(system='', last=0) -%}
{%- for m in messages -%}{%- if m.role == 'system' -%}{%- set ns.system = m.content + '\\n\\n' -%}
{%- elif m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{{ '[INST] ' + (ns.system if loop.index0 == ns.last else '') + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' -%}{{ ' ' + m.content + eos_token }}{%- endif -%}
{%- endfor -%}"""

SMOLLM2 = """{% for m in messages %}{% if loop.first and m.role != 'system' %}
{{- '<|im_start|>system\\nYou are Smol.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# The turn's end is the next message's first token.
GLM = """[gMASK]<sop>
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{ '<|assistant|>\\n' + m.content }}
{%- for call in m.tool_calls or [] -%}
{{ '<tool_call>' + call.function.name + '\\n' + (call.function.arguments | tojson) + '</tool_call>' }}{%- endfor -%}
{%- elif m.role == 'tool' -%}{{ '<|observation|>\\n' + m.content }}
{%- else -%}{{ '<|' + m.role + '|>\\n' + m.content }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}"""

# Not thinking by default: prompt and history both hold the closing tag. Reasoning is dropped from the history.
DEEPSEEK_V31 = """{{ bos_token }}{%- for m in messages -%}
{%- if m.role == 'user' -%}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' -%}
{{ '<｜Assistant｜></think>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
{%- else -%}{{ m.content }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{%- endif -%}"""

# Always thinking: only the generation prompt opens the block, every rendering drops the reasoning.
DEEPSEEK_R1 = """{{ bos_token }}{%- for m in messages -%}
{%- if m.role == 'user' -%}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' -%}
{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
{%- else -%}{{ m.content }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<｜Assistant｜><think>\\n' }}{%- endif -%}"""

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

CHATML_NO_PROMPT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
)

TAGGED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}
{%- generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\\n' }}{% else %}{{ m.content + '<|im_end|>\\n' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# The empty block only in the generation prompt: a model without thinking, served with a thinking family's prompt.
PROMPT_ONLY_BLOCK = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n\\n</think>\\n\\n' }}{% endif")

PLAIN = """{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""

SPECIAL = (
    "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>",
    "<|system|>", "<|observation|>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>")
END = {LLAMA3: "<|eot_id|>", GEMMA: "<end_of_turn>", MISTRAL: "</s>", GLM: "<|user|>"}
END |= dict.fromkeys((DEEPSEEK_V31, DEEPSEEK_R1), "<｜end▁of▁sentence｜>")

_CORPUS = [
    "system user assistant model tool answer hello there good morning how are you",
    "\n\nfine\n\n\n\nwell thanks 1 2 3 a b c",
] * 4


@cache
def _byte_level(trim: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # Words, digits, punctuation and newlines apart, as in the Qwen and Llama 3 families.
    words = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in NOT_SPECIAL])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=trim),
            processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]),
        ]
    )
    return tokenizer


@cache
def _byte_fallback() -> Tokenizer:
    # Like SentencePiece models: a mark for spaces, characters out of the vocabulary as byte tokens.
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*SPECIAL, *alphabet], show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.add_tokens([AddedToken(token, special=False, normalized=False) for token in NOT_SPECIAL])
    return plain


class SlowTokenizer(PreTrainedTokenizer):
    """One token a character, in Python: no offsets."""

    def __init__(self, **kwargs):
        self.characters = [*map(chr, range(0x250)), *"\u0301漢字👩👧😀\u200d"]
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self.characters)

    def get_vocab(self):
        return {c: i for i, c in enumerate(self.characters)} | self.added_tokens_encoder

    def _tokenize(self, text, **kwargs):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.characters.index(token)

    def _convert_id_to_token(self, index):
        return self.characters[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


def make_tokenizer(template: str | None, kind: str = "byte_level"):
    """A tiny tokenizer; the kinds byte_level and trimmed (offsets) add BOS, byte_fallback and slow do not."""
    if kind == "slow":
        slow = SlowTokenizer(eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"])
        slow.chat_template = template
        return slow
    backend = _byte_fallback() if kind == "byte_fallback" else _byte_level(kind == "trimmed")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(backend.to_str()),
        bos_token="<s>",
        eos_token=END.get(template or "", "<|im_end|>") if template != GLM else "</s>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = template
    return tokenizer


def write(path: Path, records: Iterable[dict]) -> str:
    """A JSONL file of `records`; its path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **more: object) -> dict:
    return {"role": "assistant", "content": text, **more}


def chats(count: int, start: int = 0) -> list[dict]:
    """Records of one short turn, answers of one to seven words."""
    return [{"messages": [user(f"hello {i}"), assistant("fine " * (i % 7 + 1))]} for i in range(start, start + count)]


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def runs(tokenizer, row) -> list[str]:
    """The supervised runs of a row, decoded."""
    found: list[list[int]] = []
    before = 0
    for token, flag in zip(row.input_ids.tolist(), row.loss_mask.tolist(), strict=True):
        if flag and not before:
            found.append([])
        if flag:
            found[-1].append(token)
        before = flag
    return [tokenizer.decode(run) for run in found]
