"""ik_llama.cpp, by its own benchmark llama-batched-bench, started for each work; see protocol.py.

The program shares the prompt (-pps) and computes tokens of its own, so it chooses none that could
be compared. It knows no suffixes and no verification: they are timed as prompts of as many tokens
in one piece with nothing before them, which favours it. Loading and repacking are not counted.
"""

from __future__ import annotations

import resource
import subprocess
import tempfile

from protocol import Answer, Run, Work, options, serve

FLASH = {"on": ["-fa", "on"], "off": ["-fa", "off"]}


def rows(text: str) -> list[tuple[float, float]]:
    """Seconds of prompt and of new tokens in each line of its table:
    | PP | TG | B | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s | T s | S t/s |"""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 10 and cells[0].isdigit():
            found.append((float(cells[4]), float(cells[6])))
    return found


def prompts(work: Work) -> dict[str, int]:
    """Tokens of each phase that is a prompt for the program."""
    n = len(work["suffixes"])
    sizes = {
        "prefill": len(work["prefix"]),
        "suffix": n * (len(work["suffixes"][0]) - 1),
        "verify": n * (len(work["question"]) + 1) if work["question"] else 0,
    }
    return {phase: size for phase, size in sizes.items() if size}


def prepare() -> tuple[Run, str]:
    args = options(
        ("--program", {"required": True}),
        ("--flash", {"choices": list(FLASH), "default": "off"}),
        ("--repack", {"action": "store_true"}),
    )
    told = subprocess.run([args.program, "--version"], capture_output=True, text=True, check=True)
    version = (told.stdout + told.stderr).partition("\n")[0]

    def run(work: Work) -> Answer:
        asked = prompts(work)
        sizes, threads = ",".join(map(str, asked.values())), str(args.threads)
        command = [
            args.program, "-m", args.model, "-c", str(args.tokens), "-b", "2048", "-ub", "512",
            "-npp", sizes, "-ntg", str(work["new"]), "-npl", str(len(work["suffixes"])),
            "-t", threads, "-tb", threads, "-pps", *FLASH[args.flash],
            *(["-rtr"] if args.repack else []),
        ]  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:  # it leaves a log where it runs
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        found = rows(done.stdout + done.stderr)
        if done.returncode != 0 or len(found) != len(asked):
            raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{done.stderr}")
        seconds = {phase: prompt for phase, (prompt, _) in zip(asked, found, strict=True)}
        seconds["decode"] = found[0][1]
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        return {"seconds": seconds, "tokens": None, "chosen": None, "peak_bytes": peak}

    return run, f"ik_llama.cpp {version}"


if __name__ == "__main__":
    serve(prepare)
