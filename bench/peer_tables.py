"""Tables of what was counted side by side, from ``results/counts-peers.json`` and nothing else."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from markdown import paragraph, table
from side_by_side import NAMES, RESULT

Row = dict[str, Any]
OURS, *OTHERS = (name for name in NAMES if name != "optimi")
ESTIMATED = [name for name in OTHERS if name != "FlagGems"]  # whose grids depend on autotuning
DIRECTIONS = "forward", "backward", "both", "step"
NOTHING = "Not counted yet: `python bench/counts.py --peers --snapshot`"
NEAR = 1.02  # a smaller difference is none
SHORT = (  # of the front page
    "softmax n=4096", "layer_norm n=4096", "rms_norm n=4096", "add_rms_norm n=4096",
    "cross_entropy n=50257",
)  # fmt: skip
ALSO = "softmax n=256", "softmax n=4095", "softmax n=50257", "cross_entropy n=1000"


def load(path: Path = RESULT) -> Row | None:
    return json.loads(path.read_text()) if path.exists() else None


def by_case(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Return by case and peer the sums of forward and backward."""
    found: dict[str, dict[str, Row]] = {}
    done = Counter((row["case"].rpartition(" ")[0], row["peer"]) for row in rows)
    for row in rows:
        case, _, direction = row["case"].rpartition(" ")
        assert direction in DIRECTIONS, row["case"]
        if done[case, row["peer"]] < done[case, OURS]:
            continue  # it failed in one direction
        of_peer = found.setdefault(case, {}).setdefault(row["peer"], {"roofline": {}})
        for what in ("bytes", "asked", "instructions", "launches"):
            of_peer[what] = of_peer.get(what, 0) + row[what]
        for gpu, ends in row["roofline"].items():
            before = of_peer["roofline"].get(gpu, (0.0, 0.0, 0.0))
            of_peer["roofline"][gpu] = tuple(a + b for a, b in zip(before, ends, strict=True))
    return found


def _cell(row: Row | None, ours: Row) -> str:
    """Return bytes and instructions; bold if they are fewer than ours."""
    if row is None:
        return ""
    texts = []
    for what, digits in (("bytes", 1), ("instructions", 0)):
        text = f"{row[what]:.{digits}f}"
        texts.append(f"**{text}**" if row[what] * NEAR < ours[what] else text)
    return " / ".join(texts)


def counts(found: Row) -> str:
    """Return bytes and instructions of every case."""
    names = OURS, *OTHERS
    return table(
        ("forward and backward", *names),
        (
            (case, *(_cell(peers.get(peer), peers[OURS]) for peer in names))
            for case, peers in by_case(found["rows"]).items()
            if OURS in peers and "AdamW" not in case
        ),
    )


def short(found: Row | None) -> str:
    """Return the table of the most important counts; "" without a snapshot."""
    cases = by_case(found["rows"]) if found else {}
    kept = {case: cases[case] for case in SHORT if OURS in cases.get(case, {})}
    if not kept:
        return ""
    about = (
        "An [emulator](#side-by-side-without-a-gpu) counted bytes that memory has to move / PTX "
        "instructions, per element, of forward and backward in float16. **Bold**: fewer than ours."
    )
    rows = (
        (peer, *(_cell(peers.get(peer), peers[OURS]) for peers in kept.values()))
        for peer in (OURS, *OTHERS)
    )
    return paragraph(about) + "\n\n" + table(("", *kept), rows)


def ahead(found: Row) -> str:
    """Return the cases in which a peer has fewer bytes or a lower estimate than ours."""
    cases = by_case(found["rows"])
    what = {
        "move fewer bytes": lambda row: row["bytes"],
        "have a lower estimate on an H100": lambda row: row["roofline"]["H100"][1],
    }
    texts = []
    for name, of in what.items():
        better = [
            f"{case} {peer} {of(peers[peer]) / of(peers[OURS]):.2f}"
            for case, peers in cases.items()
            for peer in ESTIMATED
            if peer in peers and OURS in peers and of(peers[peer]) * NEAR < of(peers[OURS])
        ]
        texts.append(f"Peers that {name}, relative to ours: {', '.join(better) or 'none'}.")
    return "\n\n".join(map(paragraph, texts))


def estimates(found: Row) -> str:
    """Return a table of estimated times relative to ours, by GPU."""
    cases = by_case(found["rows"])
    gpus = list(found["rows"][0]["roofline"])
    rows = []
    for case in (*SHORT, *ALSO):
        peers = cases.get(case, {})
        for peer in ESTIMATED if OURS in peers else ():
            if peer in peers:
                pairs = ((peers[peer]["roofline"][g], peers[OURS]["roofline"][g]) for g in gpus)
                rows.append((case, peer, *(_ratio(theirs, ours) for theirs, ours in pairs)))
    return table(("estimate, relative to ours", "peer", *gpus), rows)


def _ratio(theirs: Any, ours: Any) -> str:
    """Return the ratio of two estimates, with the range that their ends allow."""
    ratio, low, high = theirs[1] / ours[1], theirs[0] / ours[2], theirs[2] / ours[0]
    text = f"{ratio:.2f}x"
    text = f"**{text}**" if ratio * NEAR < 1 else text
    return f"{text} ({low:.1f} to {high:.1f})"


def errors(found: Row) -> str:
    """Return a table of errors of gradients, and of FP64 gradients that are rounded once."""
    whats = "zeroed, rounding", "largest error, rounding"
    head = "gradients", "peer", *(f"at {at}: {what}" for at in ("1", "2^16") for what in whats)
    lines = []
    for row in found["errors"]:
        if "scale 1" not in row or not re.search("n=1024|group|entropy", row["case"]):
            continue
        cells = []
        for scale in ("scale 1", "scale 65536"):
            of = row[scale]
            cells.append(f"{100 * of['zeroed']:.2f} %, {100 * of['zeroed_by_rounding']:.2f} %")
            lost = f" ({100 * of['not_finite']:.0f} % not finite)" if of["not_finite"] else ""
            cells.append(f"{of['error']:.1e}, {of['error_by_rounding']:.1e}{lost}")
        lines.append((f"{row['case']}, {row['rows']} rows", row["peer"], *cells))
    return table(head, lines)


def adam(found: Row) -> str:
    texts = [
        f"{row['peer']} {row['bytes']:.1f} B and {row['launches']} launches"
        for row in found["rows"]
        if row["case"] == "AdamW step"
    ]
    about = (
        "Ours has FP32 masters and FP32 state. optimi's has bfloat16 parameters and state, no "
        "masters, and no check, so it compares with the rows of "
        "[other formats](#bytes-of-a-step) instead."
    )
    return paragraph(f"A step of AdamW, per parameter: {'; '.join(texts)}. {about}")


def absent(found: Row) -> str:
    texts = [
        f"{row['peer']}{' ' + row['case'] if 'case' in row else ''}: {row['reason']}"
        for row in found["not_counted"]
    ]
    return paragraph(f"Not counted: {'; '.join(dict.fromkeys(texts))}.") if texts else ""


def page(found: Row | None) -> str:
    """Return all tables, as Markdown."""
    if found is None:
        return NOTHING
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    about = (
        f"Float16, sm_90, {found['date']}, commit {found['commit']}, `{found['command']}` "
        f"({found['seconds']} s), {versions}. Each cell has two numbers per element: the bytes of "
        "the sectors that launches touch, each sector counted once, and the PTX instructions of a "
        "thread. **Bold**: fewer than ours. A kernel of torch itself counts as one read and write "
        "of its operands, without instructions. "
        "[counts-peers.json](results/counts-peers.json) has every row, forward and backward alone, "
        "sectors per request, and launches."
    )
    parts = [paragraph(about), counts(found), adam(found), ahead(found)]
    parts += [estimates(found), errors(found), absent(found)]
    return "\n\n".join(part for part in parts if part)
