"""`dflash regenerate`: the target answers the prompts of a file itself, in this process or on a server."""

from __future__ import annotations

import argparse
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dflash_lightning.cli import add_target_argument, check_range
from dflash_lightning.data import resolve_files
from dflash_lightning.data.answers import Answer, Summary, conversations, in_threads, regenerate
from dflash_lightning.target.loading import load_model
from dflash_lightning.target.resolve import load_tokenizer

_BACKOFF_SECONDS = 0.5


class LocalAnswerer:
    """Batched generation in this process.

    Args:
        target: see `resolve_target`.
        options: max_new_tokens, temperature, top_p, batch_size, device, dtype, seed, trust_remote_code.
    """

    def __init__(self, target: str, options: argparse.Namespace) -> None:
        self.concurrency = options.batch_size
        self._options = options
        self._tokenizer: Any = load_tokenizer(target, options.trust_remote_code)
        if not self._tokenizer.chat_template:
            raise ValueError(
                f"--target={target}: its tokenizer has no chat template, so it cannot answer a conversation"
            )
        self._tokenizer.padding_side = "left"
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model: Any = load_model(
            target, dtype=options.dtype, device=options.device, trust_remote_code=options.trust_remote_code
        )
        torch.manual_seed(options.seed)

    def answer(self, conversations: Sequence[list[dict[str, Any]]]) -> list[Answer | Exception]:
        texts: list[str | Exception] = [self._render(c) for c in conversations]
        usable = [text for text in texts if isinstance(text, str)]
        found = iter(self._generate(usable) if usable else [])
        return [text if isinstance(text, Exception) else next(found) for text in texts]

    def _render(self, conversation: list[dict[str, Any]]) -> str | Exception:
        """The prompt's text; what a template says against one conversation is no matter of the others."""
        try:
            return self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template stumbles over what its author did not think of, in any way
            return ValueError(f"the target's chat template refuses the conversation: {error}")

    def _generate(self, texts: list[str]) -> list[Answer]:
        encoded = self._tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        encoded = {k: encoded[k].to(self._options.device) for k in ("input_ids", "attention_mask")}
        greedy = self._options.temperature == 0.0
        sampling = {} if greedy else {"temperature": self._options.temperature, "top_p": self._options.top_p}
        with torch.inference_mode():
            out = self._model.generate(
                **encoded,
                max_new_tokens=self._options.max_new_tokens,
                do_sample=not greedy,
                pad_token_id=self._tokenizer.pad_token_id,
                **sampling,
            )
        stop = self._model.generation_config.eos_token_id
        stop = set(stop if isinstance(stop, list) else [stop])
        answers = []
        for row in out[:, encoded["input_ids"].shape[1] :].tolist():
            end = next((i for i, token in enumerate(row) if token in stop), None)
            text = self._tokenizer.decode(row if end is None else row[:end], skip_special_tokens=True)
            answers.append(Answer(text, truncated=end is None))
        return answers


class ServerAnswerer:
    """An OpenAI-compatible server (vLLM, SGLang): POST URL/chat/completions, several at once, with retries.

    Args:
        url: base address, with or without `/v1`.
        options: model, max_new_tokens, temperature, top_p, concurrency, retries, seed, api_key.
    """

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        base = url.rstrip("/")
        self._url = base if base.endswith("/v1") else base + "/v1"
        self.concurrency = options.concurrency
        self._options = options
        self._model = options.model or self._request("/models")["data"][0]["id"]

    def answer(self, conversations: Sequence[list[dict[str, Any]]]) -> list[Answer | Exception]:
        return in_threads(self._ask, conversations, self.concurrency)

    def _ask(self, messages: list[dict[str, Any]]) -> Answer:
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": self._options.max_new_tokens,
            "temperature": self._options.temperature,
            "top_p": self._options.top_p,
            "seed": self._options.seed,
        }
        choice = self._request("/chat/completions", body)["choices"][0]
        return Answer(choice["message"]["content"] or "", choice.get("finish_reason") == "length")

    def _request(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._options.api_key:
            headers["Authorization"] = f"Bearer {self._options.api_key}"
        data = None if body is None else json.dumps(body).encode()
        last: Exception | None = None
        for attempt in range(self._options.retries + 1):
            request = urllib.request.Request(self._url + path, data, headers)
            try:
                with urllib.request.urlopen(request, timeout=self._options.timeout) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code != 429:  # asking again would not help
                    raise ValueError(f"the server refused the request: {error.code} {error.reason}") from None
                last = error
            except (OSError, json.JSONDecodeError) as error:
                last = error
            if attempt < self._options.retries:
                time.sleep(_BACKOFF_SECONDS * 2**attempt)
        raise ConnectionError(f"no answer from {self._url}{path} in {self._options.retries + 1} tries: {last}")


def main(argv: list[str]) -> int:
    """Run `dflash regenerate`; exit code 1 when some rows failed (call again to retry them)."""
    parser = argparse.ArgumentParser(prog="dflash regenerate", description=__doc__)
    add_target_argument(parser)
    parser.add_argument("--data", nargs="+", required=True, help="files with conversations or prompts")
    parser.add_argument("--out", required=True, help="JSONL to append to; rows that it holds are not asked again")
    parser.add_argument("--max-new-tokens", type=int, default=1024, help="most tokens of an answer (1024)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling (1: off)")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling")
    parser.add_argument("--drop-truncated", action="store_true", help="leave out rows with a cut-off answer")
    parser.add_argument("--batch-size", type=int, default=16, help="in this process: conversations at once (16)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="in this process")
    parser.add_argument("--dtype", default="auto", help="in this process: dtype of the target")
    parser.add_argument("--concurrency", type=int, default=64, help="server: requests at once (64)")
    parser.add_argument("--retries", type=int, default=3, help="server: tries again after a failure (3)")
    parser.add_argument("--timeout", type=float, default=600.0, help="server: seconds to wait for an answer (600)")
    parser.add_argument("--model", default=None, help="server: model name; default the first that it lists")
    parser.add_argument("--api-key", default=None, help="server: bearer token")
    args = parser.parse_args(argv)
    for name in ("max_new_tokens", "batch_size", "concurrency"):
        check_range(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    for name in ("temperature", "retries", "timeout"):
        check_range(f"--{name}", getattr(args, name), 0)
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p={args.top_p}: above 0, at most 1")
    files = resolve_files(args.data, "--data")
    out = Path(args.out)
    if any(out.resolve() == file.resolve() for file in files):
        raise ValueError(f"--out={args.out}: this is one of the --data files; give another")
    on_server = args.target.startswith(("http://", "https://"))
    answerer = ServerAnswerer(args.target, args) if on_server else LocalAnswerer(args.target, args)
    summary = Summary()
    with tqdm(desc="regenerate", unit=" rows") as bar:
        source = conversations(files, summary)
        regenerate(source, answerer, out, summary, drop_truncated=args.drop_truncated, progress=bar)
    print(summary)
    return 1 if summary.failed else 0
