"""Command line: thin wrappers around the library, for people at a terminal."""

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import jax
import numpy as np
import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from tokenizers import Tokenizer

from muse_jax import decode
from muse_jax.calibration import calibrate as find_input_scales
from muse_jax.detokenizer import is_text
from muse_jax.doctor import diagnose
from muse_jax.generate import EVERY, check_stop_strings, stream
from muse_jax.generation import Generation
from muse_jax.guarantee import BITWISE
from muse_jax.inspection import Inspection, inspect_checkpoint
from muse_jax.language_model import LanguageModel, load
from muse_jax.mesh import RANKS, make_mesh
from muse_jax.parity import ParityReport, flip_bit
from muse_jax.parity import parity as run_parity
from muse_jax.progress import progress_bar, size
from muse_jax.sampling import MAX_LOGPROBS, Sampling
from muse_jax.speculative import DFlashDraft
from muse_jax.speculative.dflash_weights import load_draft, open_draft
from muse_jax.weights.checkpoints import read_contents
from muse_jax.weights.convert import FORMS, convert_checkpoint
from muse_jax.weights.quantize import write_input_scales
from muse_jax.weights.repack import repack

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
# What is printed are names, paths and a model's text: nothing in them is markup or the name of an emoji.
_PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
out = Console(soft_wrap=True, **_PLAIN)
err = Console(stderr=True, soft_wrap=True, **_PLAIN)

Checkpoint = Annotated[Path, typer.Argument(help="Checkpoint folder: ours (Orbax) or Hugging Face (safetensors).")]
Devices = Annotated[
    int | None,
    typer.Option(help="Devices that carry the 8 ranks: 1, 2, 4 or 8. Default: as many as there are; on a CPU 8."),
]
SourceRows = Annotated[
    str | None,
    typer.Option(metavar="hf|meta", help="Order of q and k rows in safetensors. Default: as the files say, or hf."),
]
Prompt = Annotated[str, typer.Option(help="Text, encoded by the checkpoint's tokenizer.")]
DraftWidth = Annotated[int | None, typer.Option(help="Nodes of its trees. Default: the draft's block.")]

DEFAULT_PROMPT = "def decode(state, tokens):"


def _prepare_cpu(devices: int | None) -> None:
    os.environ.setdefault("PJRT_NPROC", "64")  # jaxlib before 0.12 hangs when many CPU programs are in flight
    jax.config.update("jax_num_cpu_devices", devices or RANKS)  # only read by the CPU backend


def _look_only() -> None:
    """For commands that load no model: GPU memory may be another job's."""
    _prepare_cpu(None)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _load(checkpoint: Path, devices: int | None, reference: bool = True) -> LanguageModel:
    _prepare_cpu(devices)
    mesh = make_mesh(devices)
    with progress_bar(err, "loading", "loaded") as progress:
        return load(checkpoint, mesh=mesh, reference=reference, progress=progress)


def _encode(model: LanguageModel, prompt: str) -> list[int]:
    if model.tokenizer is None:
        raise ValueError("this checkpoint has no tokenizer.json; copy the model's into the folder")
    return model.tokenizer.encode(prompt).ids or [model.config.bos_token_id]


def _check(option: str, value: int | None, least: int, most: int | None = None) -> None:
    """Before a checkpoint is loaded, which may take minutes."""
    if value is not None and (value < least or (most is not None and value > most)):
        allowed = f"whole numbers from {least} on" if most is None else f"{least} to {most}"
        raise ValueError(f"{option} is {value}, allowed: {allowed}")


def _load_all(
    checkpoint: Path,
    devices: int | None,
    prompt: str,
    draft: Path | None,
    draft_width: int | None,
    reference: bool = True,
) -> tuple[LanguageModel, list[int], DFlashDraft | None]:
    """(model, with its reference or without; the prompt's ids; draft)."""
    if draft is None and draft_width is not None:
        raise ValueError("--draft-width is of no use without --draft")
    if not is_text(prompt):
        raise ValueError(
            f"--prompt is {prompt!r}, allowed: text in the terminal's encoding, {sys.getfilesystemencoding()}"
        )
    # Before the checkpoint is loaded, which says itself what is wrong with its config.json.
    if draft is not None and (config := read_contents(checkpoint).config) is not None:
        open_draft(draft, config, width=draft_width)
    model = _load(checkpoint, devices, reference)
    return model, _encode(model, prompt), None if draft is None else load_draft(draft, model, width=draft_width)


def _verdict(report: ParityReport) -> str:
    verdict = (
        f"differing bytes: {report.differing_bytes} of {report.bytes:,} compared with {report.against} "
        f"({len(report.tokens)} positions)"
    )
    return verdict if report.guarantee == BITWISE else f"{verdict}; {report.guarantee}"


def _print_facts(facts: Mapping[str, str]) -> None:
    for label, value in facts.items():
        out.print(f"{label:21}  {value}")


def _exit_with(problems: Iterable[str]) -> NoReturn:
    """Exit code 1 and a line for each, or 0."""
    lines = [f"problem: {problem}" for problem in problems]
    for line in lines:
        out.print(line)
    raise typer.Exit(1 if lines else 0)


def _log_probs(tokenizer: Tokenizer, result: Generation) -> Table:
    """One line per token of the first sequence."""
    assert result.log_probs is not None
    tokens, own = result.tokens[0], result.log_probs[0]
    table = Table("token", "text", "log-prob", "most probable")
    for i, token in enumerate(tokens):
        best = ""
        if result.top_tokens is not None and result.top_log_probs is not None:
            pairs = zip(result.top_tokens[0][i].tolist(), result.top_log_probs[0][i].tolist(), strict=True)
            best = "  ".join(f"{other} {value:.4f}" for other, value in pairs)
        table.add_row(str(token), Text(repr(tokenizer.decode([token]))), f"{own[i]:.4f}", best)
    return table


def _calls_per_step(model: LanguageModel) -> str:
    state = model.init_state(capacity=16)
    step = jax.jit(decode.decode_step, donate_argnames=("state",))
    compiled = step.lower(model.weights, state, jax.numpy.zeros(1, jax.numpy.int32)).compile()
    calls = decode.custom_calls(compiled)
    return f"{sum(calls.values())} ({', '.join(sorted(calls))}), counted in the compiled HLO"


def _speculation(result: Generation) -> dict[str, str]:
    if result.acceptance is None or result.tokens_per_step is None:
        return {}
    shares = " ".join(f"{share:.2f}" for share in result.acceptance.by_position)
    return {
        "steps": f"{result.steps} after the prompt, {result.tokens_per_step:.2f} tokens each",
        "accepted": f"{shares} (share of the steps, by place behind the newest token)",
    }


@app.command()
def generate(
    checkpoint: Checkpoint,
    prompt: Prompt = DEFAULT_PROMPT,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    devices: Devices = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    live: Annotated[bool, typer.Option("--stream", help="Also print the text as it comes.")] = False,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sample at this temperature. Default: greedy; 1 where another option of sampling is given."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most probable tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the most probable tokens that reach p.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Sample from tokens at least this many times as probable as the best.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sampling key. Default: 0.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Print every token's log-probability and so many of the most probable ones.")
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(help="Folder of a DFlash draft: the same text in fewer steps.", exists=True, file_okay=False),
    ] = None,
    draft_width: DraftWidth = None,
    check: Annotated[
        bool, typer.Option("--check", help="Also compare the text's every tap with the reference.")
    ] = False,
) -> None:
    """Continue a prompt with the fused decode step, greedily or sampled."""
    _check("--max-new-tokens", max_new_tokens, 1)
    _check("--seed", seed, 0, 2**32 - 1)
    _check("--logprobs", logprobs, 0, MAX_LOGPROBS)
    check_stop_strings(stop or ())
    sampling = None
    if any(option is not None for option in (temperature, top_k, top_p, min_p, seed)):
        sampling = Sampling(
            temperature=1.0 if temperature is None else temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )
    # The reference's parameters take as much memory again.
    model, ids, loaded_draft = _load_all(checkpoint, devices, prompt, draft, draft_width, reference=check)
    pieces = stream(
        model, ids, max_new_tokens=max_new_tokens, stop_strings=stop or (), sampling=sampling,
        keys=None if sampling is None else jax.random.key(seed or 0, impl="threefry2x32"),
        logprobs=logprobs, draft=loaded_draft, every=EVERY if live or stop else max(1, max_new_tokens),
    )  # fmt: skip
    if live:
        for piece in pieces:
            out.print(piece.text, end="")
        out.print()
    result = pieces.result()
    assert model.tokenizer is not None and result.texts is not None
    mesh_devices = model.mesh.devices.flat
    _print_facts(
        {
            "prompt": repr(prompt),
            "generated": repr(result.texts[0]),
            "token ids": " ".join(map(str, result.tokens[0])),
            "finished by": result.finish_reasons[0],
            "devices": f"{len(mesh_devices)} x {mesh_devices[0].device_kind}, {RANKS} ranks",
            "guarantee": result.guarantee,
            "custom calls per step": _calls_per_step(model),
            **_speculation(result),
        }
    )
    if result.log_probs is not None:
        out.print(_log_probs(model.tokenizer, result))
    if check:
        report = run_parity(model, ids + result.tokens[0][:-1], chunk=len(ids))
        out.print(_verdict(report))
        raise typer.Exit(1 if report.differing_bytes else 0)


@app.command()
def parity(
    checkpoint: Checkpoint,
    prompt: Prompt = DEFAULT_PROMPT,
    steps: Annotated[int, typer.Option(help="Tokens to decode one by one after the prompt.")] = 64,
    devices: Devices = None,
    draft: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a DFlash draft: compare decoding with it, text and every tap, with plain decoding instead.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    draft_width: DraftWidth = None,
    flip: Annotated[
        str | None,
        typer.Option(
            "--flip-bit",
            metavar="NAME[:ELEMENT[:BIT]]",
            help="For testing the test: flip one bit of this parameter on the decoding side only.",
        ),
    ] = None,
) -> None:
    """Run decode and reference, or decode with a draft and without, side by side; exit code 1 if a byte differs."""
    _check("--steps", steps, 0)
    model, ids, loaded_draft = _load_all(checkpoint, devices, prompt, draft, draft_width)
    weights = model.weights
    if flip is not None:
        params, described = flip_bit(model.params, flip)
        weights = repack(model.config, params, model.mesh, weights.communicator)
        out.print(f"flipped on the decoding side: {described}")
    report = run_parity(model, ids, steps=steps, weights=weights, draft=loaded_draft)
    table = Table(Column("tap", min_width=35), "bytes", "differing", "first at", "max ulp")
    for tap in report.taps:
        position = "" if tap.first_position is None else str(tap.first_position)
        table.add_row(tap.tap, f"{tap.bytes:,}", str(tap.differing_bytes), position, str(tap.max_ulp))
    out.print(table)
    if report.first is not None:
        out.print(f"first difference: {report.first.tap}, position {report.first.first_position}")
    if draft is not None:
        out.print(f"steps: {report.steps} after the prompt instead of {steps}")
    out.print(_verdict(report))
    if flip is not None and not report.differing_bytes:
        out.print("the flipped bit changes nothing on this text: an unused row or expert, say; flip another")
    raise typer.Exit(1 if report.differing_bytes else 0)


@app.command()
def doctor() -> None:
    """Say what is installed, which devices there are and which guarantees hold on them; exit code 1 if one does not."""
    _look_only()
    if (platforms := jax.config.values["jax_platforms"]) and "cpu" not in platforms.split(","):
        jax.config.update("jax_platforms", f"{platforms},cpu")  # GPUs are compared with it
    diagnosis = diagnose()
    _print_facts(diagnosis.facts)
    _exit_with(diagnosis.problems)


def _print_table(table: Table) -> None:
    if out.is_terminal:
        out.print(table)
    else:  # for programs and files: no lines, nothing wrapped
        table.box, table.pad_edge = None, False
        Console(width=200, **_PLAIN).print(table)


def _print_contents(found: Inspection) -> None:
    table = Table("stored", Column("tensors", justify="right"), "dtypes", Column("bytes", justify="right"))
    for group in found.groups:
        table.add_row(group.name, str(group.tensors), ", ".join(group.dtypes), f"{group.bytes:,}")
    _print_table(table)


def _print_decode_layout(found: Inspection) -> None:
    assert found.arrays is not None and found.layer_weights is not None and found.weights is not None
    right = [Column(name, justify="right") for name in ("layers", "a layer, per rank", "per rank of 8", "per device")]
    table = Table("decode layout", "dtype", *right)
    for array in found.arrays:
        layers = {None: "", 0: "none"}.get(array.layers, str(array.layers))
        layer = f"{array.layer_size.per_rank:,}" if array.layer_size and array.layer_size.per_rank else ""
        sizes = (f"{n:,}" if n else "" for n in (array.size.per_rank, array.size.per_device))
        table.add_row(array.name, array.dtype, layers, layer, *sizes)
    for kind, layer_size in found.layer_weights.items():
        name = "an NVFP4 layer" if kind == "nvfp4" else "a bf16 layer"
        table.add_row(name, "", "", f"{layer_size.per_rank:,}", "", f"{layer_size.per_device:,}")
    table.add_row("all", "", "", "", f"{found.weights.per_rank:,}", f"{found.weights.per_device:,}")
    _print_table(table)


def _memory_facts(found: Inspection) -> dict[str, str]:
    assert found.caches is not None
    caches, fit = found.caches, found.fit
    facts = {
        "KV per rank": f"{caches.token_bytes:,} bytes per token (full layers) and {caches.ring_bytes:,} per sequence "
        f"(sliding layers); batch {caches.batch}, capacity {caches.capacity:,}: {size(caches.size.per_rank)}",
    }
    if fit is None:
        return facts | {"fits": "unknown: the devices do not say how much memory they have"}
    needed = f"{size(fit.weights)} weights + {size(fit.caches)} caches on each of {fit.devices} x {fit.kind}"
    facts["memory"] = f"{size(fit.available)} for each of {fit.devices} x {fit.kind} ({fit.available_from})"
    if fit.fits:
        room = f"{size(fit.left)} left, enough for a capacity of {fit.largest_capacity:,}"
        facts["fits"] = f"yes: {needed}; {room}"
    else:
        smaller = f"; a capacity of {fit.largest_capacity:,} would fit" if fit.largest_capacity else ""
        facts["fits"] = f"no: {needed} are {size(-fit.left)} too much{smaller}"
    facts["fits with reference"] = (
        f"{'yes' if fit.fits_with_params else 'no'}: load(reference=True) keeps the training layout as well, "
        f"{size(fit.params)} more"
    )
    return facts


@app.command()
def inspect(
    checkpoint: Checkpoint,
    devices: Annotated[
        int | None,
        typer.Option(help="Devices to fit, 1, 2, 4 or 8, even if fewer are here. Default: those that are; on a CPU 8."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences that are decoded at once.")] = 1,
    capacity: Annotated[
        int | None, typer.Option(help="Tokens of each sequence. Default: 4096, or the model's limit if it is less.")
    ] = None,
) -> None:
    """Say what a checkpoint holds and whether decoding fits, without loading it; exit code 1 if something is wrong."""
    _look_only()
    found = inspect_checkpoint(checkpoint, devices=devices, batch=batch, capacity=capacity)
    kind = "Orbax" if found.kind == "orbax" else "Hugging Face safetensors"
    held = f"{found.tensors:,} tensors, {size(found.bytes)}" if found.groups else "tensors unreadable"
    facts = {"checkpoint": f"{kind}, {held}"}
    if found.unread:
        facts["not read"] = f"{', '.join(found.unread)} (beside model.safetensors or its index)"
    _print_facts(facts | ({} if found.model is None else {"model": found.model}))
    if found.groups:
        _print_contents(found)
    if found.config is not None:
        _print_decode_layout(found)
        _print_facts(_memory_facts(found))
    _exit_with(found.problems)


@app.command()
def convert(
    checkpoint: Checkpoint,
    target: Annotated[Path, typer.Argument(help="Folder to make; it appears when it is complete.")],
    to: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(FORMS),
            help="Form to make: ours, or safetensors with q and k rows in Hugging Face's or Meta's order. "
            "Default: hf from ours, orbax from safetensors.",
        ),
    ] = None,
    source_rows: SourceRows = None,
    quantize: Annotated[bool, typer.Option("--quantize", help="bf16 experts become NVFP4.")] = False,
    input_scales: Annotated[
        Path | None, typer.Option(help="File of `calibrate`, for --quantize. Default: input scales of 1.")
    ] = None,
) -> None:
    """Convert a checkpoint between our form and safetensors; the same command goes on with a run that was stopped."""
    _look_only()
    try:
        with progress_bar(err, "converting", "converted") as progress:
            made = convert_checkpoint(
                checkpoint,
                target,
                to=to,  # type: ignore[arg-type]  (it says what is allowed)
                source_rows=source_rows,  # type: ignore[arg-type]
                quantize=quantize,
                input_scales=input_scales,
                progress=progress,
            )
    except KeyboardInterrupt:
        err.print("muse-jax: stopped; the same command goes on with what is written")
        raise typer.Exit(130) from None
    facts = {"checkpoint": f"{made.folder}, {made.form}, {size(made.bytes)}"}
    if made.resumed_bytes:
        facts["of earlier runs"] = size(made.resumed_bytes)
    if made.left_out:
        left_out = f"{len(made.left_out):,} tensors, {size(sum(made.left_out.values()))}"
        facts["left out"] = f"{left_out}, which the text decoder has no use for (vision, audio, caches' scales)"
    _print_facts(facts)


@app.command()
def calibrate(
    checkpoint: Checkpoint,
    text: Annotated[Path, typer.Argument(help="UTF-8 text of the kind that the model is for.")],
    scales: Annotated[Path, typer.Argument(help="safetensors file to make, for `convert --input-scales`.")],
    source_rows: SourceRows = None,
) -> None:
    """Find input scales for NVFP4 experts: runs a bf16 checkpoint on a text, layer by layer."""
    _look_only()
    if scales.exists():
        raise ValueError(f"{scales} exists already; choose another name, or remove it")
    if not scales.absolute().parent.is_dir():
        raise ValueError(f"{scales}: no such folder; make it, or choose another one")
    try:
        sample = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{text}: not UTF-8 text ({error.reason} at {error.start}); give text") from error
    except OSError as error:
        raise ValueError(f"{text}: {error.strerror}; check the path and its permissions") from error
    with progress_bar(err, "calibrating", "calibrated") as progress:
        found = find_input_scales(checkpoint, sample, source_rows=source_rows, progress=progress)  # type: ignore[arg-type]
    write_input_scales(scales, found, {"muse_jax_text_sha256": hashlib.sha256(sample.encode()).hexdigest()})
    values = np.concatenate([array.reshape(-1) for array in found.values()])
    _print_facts({"input scales": f"{scales}, {values.size:,} from {values.min():.3g} to {values.max():.3g}"})


def main() -> None:
    """Entry point: an error that the library explains is printed without a traceback, exit code 2."""
    try:
        app()
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: JAX's too
        err.print(f"muse-jax: {error}")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
