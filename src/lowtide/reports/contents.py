# SPDX-License-Identifier: Apache-2.0
"""Say what a file holds: `lowtide show`.

    step.pickle: CUDA memory snapshot of cuda:0

      events          1,204
      blocks            612   4 before the first event, 6 at the end
      peak live    7.98 GiB   at event 800
      ...

Plain facts go in (a `Contents`, also written as JSON), text comes out.
"""

from dataclasses import dataclass

from lowtide.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Category:
    """Blocks of one kind, in sums."""

    name: str
    blocks: int
    bytes: int  # of all of them, alive at once or not
    at_peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """One of the largest blocks."""

    bytes: int
    start: int
    stop: int  # -1: never
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Blocks that come from one operator or line of code, at the peak."""

    name: str
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a file with blocks holds."""

    file: str
    kind: str
    device: str
    events: int
    seconds: float  # 0: unknown
    steps: int  # marked in the file
    blocks: int
    operators: int
    operator_seconds: float
    uses: int
    peak_bytes: int
    peak_event: int
    lower_bound_bytes: int
    reserved_bytes: int  # 0: unknown
    period: int  # allocations and releases in one steady iteration; 0: none found
    groups: tuple[str, ...]
    categories: tuple[Category, ...]
    at_peak: tuple[Place, ...]  # the largest ones
    largest: tuple[Largest, ...]
    notes: tuple[str, ...]


def render_contents(contents: Contents) -> str:
    """Return the text, ending in a newline."""
    whose = f" of {contents.device}" if contents.device else ""
    lines = [f"{contents.file}: {contents.kind}{whose}", ""]
    lines += [_row(*row) for row in _rows(contents)]
    lines += [
        "",
        "  Blocks by lifetime" + " " * 17 + "blocks     at peak   all together",
    ]
    for c in contents.categories:
        lines.append(
            f"    {c.name:<29}{c.blocks:>10,}{format_bytes(c.at_peak_bytes):>12}"
            f"{format_bytes(c.bytes):>15}"
        )
    if contents.at_peak:
        lines += ["", "  At the peak, by where it was allocated"]
    for p in contents.at_peak:
        count = f"{p.blocks:,} block{'' if p.blocks == 1 else 's'}"
        lines.append(f"    {format_bytes(p.bytes):>11}  {count:<20}  {p.name}")
    if contents.largest:
        lines += ["", "  Largest blocks"]
    for block in contents.largest:
        life = f"from {block.start} to {'the end' if block.stop < 0 else block.stop}"
        lines.append(f"    {format_bytes(block.bytes):>11}  {life:<20}  {block.place}")
    if contents.notes:
        lines.append("")
    lines += [f"  note: {note}" for note in contents.notes]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _rows(contents: Contents) -> list[tuple[str, str, str]]:
    spanned = f"in {_seconds(contents.seconds)}" if contents.seconds else ""
    rows = [("events", f"{contents.events:,}", spanned)]
    if contents.steps:
        rows.append(("optimizer steps", f"{contents.steps:,}", "marked in the file"))
    if contents.period:
        comment = "allocations and releases, again and again"
        rows.append(("one iteration", f"{contents.period:,}", comment))
    rows.append(("blocks", f"{contents.blocks:,}", ""))
    if contents.operators:
        took = f"{_seconds(contents.operator_seconds)} together"
        rows.append(("operators", f"{contents.operators:,}", took))
    if contents.uses:
        rows.append(("uses of blocks", f"{contents.uses:,}", ""))
    peak = f"at event {contents.peak_event:,}"
    rows.append(("peak live", format_bytes(contents.peak_bytes), peak))
    apart = ""
    if len(contents.groups) > 1:
        apart = f"; {len(contents.groups)} streams or pools apart"
    bound = f"no placement is lower{apart}"
    rows.append(("lower bound", format_bytes(contents.lower_bound_bytes), bound))
    if contents.reserved_bytes:
        reserved = format_bytes(contents.reserved_bytes)
        rows.append(("reserved", reserved, "peak, by the allocator that was in use"))
    return rows


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.3f} ms"


def _row(label: str, value: str, comment: str) -> str:
    return f"  {label:<17}{value:>12}   {comment}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFacts:
    """One table of a `.tide` file."""

    name: str
    rows: int
    columns: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TideFacts:
    """What a `.tide` file holds, whatever its kind."""

    file: str
    kind: str
    written_by: str
    facts: dict[str, int | float | str]  # single values, by name
    tables: tuple[TableFacts, ...]


def render_tide(facts: TideFacts) -> str:
    """Return the text, ending in a newline."""
    by = f", written by {facts.written_by}" if facts.written_by else ""
    lines = [f"{facts.file}: {facts.kind}{by}", ""]
    width = max((len(name) for name in facts.facts), default=0)
    for name, value in facts.facts.items():
        text = str(value)
        if name.endswith("bytes") and isinstance(value, int):
            text = f"{format_bytes(value)} ({value})"
        lines.append(f"  {name:<{width}}   {text}")
    if facts.tables:
        lines += ["", "  Tables"]
    for table in facts.tables:
        size = format_bytes(table.bytes)
        columns = ", ".join(table.columns)
        lines.append(f"    {table.name}: {table.rows:,} rows, {size} ({columns})")
    return "\n".join(line.rstrip() for line in lines) + "\n"
