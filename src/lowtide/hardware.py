# SPDX-License-Identifier: Apache-2.0
"""Devices: what they hold, how fast they compute and copy, and what an operator takes.

Memory, dense FLOP/s and memory bandwidth are what the vendors publish, for boards at
their boost clock and without sparsity; the source of each row stands beside it. Some
were compared with public pages, the others were written down from memory of those
sources: check a row before building on it. What no vendor publishes is a stated round
figure: a PCIe link carries about 12, 25 and 52 GB/s each way with pinned memory
(generations 3, 4 and 5, sixteen lanes; four fifths of the 16, 32 and 64 that the wires
could), and the host and disk of a card are those of a usual machine for it.

An operator takes the longest of its arithmetic and its memory traffic, and never less
than a launch (the roofline model of Williams, Waterman and Patterson, 2009):

    seconds = launch + max(flops / (peak x arithmetic), bytes / (bandwidth x traffic))

where the two efficiencies are those of the operator's kind. The ones given here are
round figures too; `calibrated` replaces them by those of a measured run. Exact times
are not to be expected without that: what the model is for is the order of operators by
cost, and the balance between computing, copying and reading memory.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from lowtide.errors import FileError, LowtideError
from lowtide.units import format_bytes

GIB = 1 << 30
GIGA, TERA = 1e9, 1e12
MEASURED = "this-machine"

Seconds = float
BytesPerSecond = float
FlopPerSecond = float


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What part of the peaks a kind of operator reaches."""

    arithmetic: float
    traffic: float


EFFICIENCIES: Mapping[str, Efficiency] = MappingProxyType(
    {
        "matmul": Efficiency(0.70, 0.80),
        "convolution": Efficiency(0.50, 0.75),
        "convolution_backward": Efficiency(0.50, 0.75),
        "recurrent": Efficiency(0.70, 0.80),
        "attention": Efficiency(0.50, 0.80),
        "elementwise": Efficiency(0.25, 0.85),
        "reduction": Efficiency(0.25, 0.75),
        "normalization": Efficiency(0.25, 0.65),
        "batchnorm": Efficiency(0.25, 0.65),
        "safesoftmax": Efficiency(0.25, 0.65),
        "copy": Efficiency(0.25, 0.85),
        "gather": Efficiency(0.25, 0.40),
        "random": Efficiency(0.25, 0.50),
        "pooling": Efficiency(0.25, 0.50),
        "other": Efficiency(0.25, 0.60),
    }
)


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds of a program's own time beside its operators; 0: not measured."""

    call: Seconds = 0.0  # of an operator: Python, dispatch and autograd
    watch: Seconds = 0.0  # of an operator, while a budget is kept
    save: Seconds = 0.0  # of a saved tensor, likewise
    move: Seconds = 0.0  # of one that leaves and returns
    moved_byte: Seconds = 0.0  # of its bytes: copies take from cores and bandwidth

    def keeping(
        self, operators: int, saved: int, moved: int = 0, moved_bytes: int = 0
    ) -> Seconds:
        """Estimate what keeping a budget adds to an iteration."""
        each = self.watch * operators + self.save * saved
        return each + self.move * moved + self.moved_byte * moved_bytes


# The type that stands in where a device has no own rate for one.
_LIKE = {"bfloat16": "float16", "float16": "float32", "tf32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A device with its link, its host and the host's disk."""

    name: str
    memory_bytes: int
    flops: Mapping[str, FlopPerSecond]  # dense, by type of the elements
    memory_bandwidth: BytesPerSecond
    to_host: BytesPerSecond  # as copies from pinned memory reach it
    from_host: BytesPerSecond
    host_bytes: int
    disk_write: BytesPerSecond
    disk_read: BytesPerSecond
    source: str
    launch: Seconds = 4e-6  # the least that an operator takes
    efficiencies: Mapping[str, Efficiency] = field(default_factory=lambda: EFFICIENCIES)
    overheads: Overheads = Overheads()

    def peak(self, dtype: str) -> FlopPerSecond:
        """Return the FLOP/s for a type, or for the next wider one where it has none."""
        wanted = dtype
        while wanted not in self.flops:
            if wanted not in _LIKE:
                known = ", ".join(self.flops)
                raise LowtideError(
                    f"{self.name} has no FLOP/s for {dtype!r}; there are: {known}"
                )
            wanted = _LIKE[wanted]
        return self.flops[wanted]

    def seconds(
        self, flops: float, n_bytes: float, dtype: str = "float32", kind: str = "other"
    ) -> Seconds:
        """Estimate how long an operator takes.

        Arguments:
            flops: floating-point operations, two for a multiplication with addition.
            n_bytes: bytes that it reads and writes.
            dtype: of the elements, as torch names it; "tf32" for float32 on tensor
                cores.
            kind: one of `EFFICIENCIES`; an unknown one counts as "other".
        """
        part = self.efficiencies.get(kind, self.efficiencies["other"])
        arithmetic = flops / (self.peak(dtype) * part.arithmetic) if flops else 0.0
        traffic = n_bytes / (self.memory_bandwidth * part.traffic)
        return self.launch + max(arithmetic, traffic)

    def scaled(self, *, flops: float = 1.0, link: float = 1.0) -> Hardware:
        """Return the same device with other FLOP/s and another link, as factors."""
        return replace(
            self,
            flops={dtype: rate * flops for dtype, rate in self.flops.items()},
            to_host=self.to_host * link,
            from_host=self.from_host * link,
        )

    def calibrated(self, measured: Iterable[Measured]) -> Hardware:
        """Return this device with the efficiencies that measured operators show.

        For each kind the median decides, on the side of the roofline that binds it;
        operators near the launch time say nothing and are left out. Kinds that were
        not measured keep the efficiencies they have.
        """
        found: dict[tuple[str, str], list[float]] = {}
        for row in measured:
            busy = row.seconds - self.launch
            if busy < 2 * self.launch:
                continue
            arithmetic = row.flops / self.peak(row.dtype)
            traffic = row.n_bytes / self.memory_bandwidth
            side = "arithmetic" if arithmetic > traffic else "traffic"
            key = (row.kind, side)
            found.setdefault(key, []).append(max(arithmetic, traffic) / busy)
        efficiencies = dict(self.efficiencies)
        for (kind, side), parts in found.items():
            known = efficiencies.get(kind, efficiencies["other"])
            value = median(parts)
            if value > 0:
                changed = {**asdict(known), side: value}
                efficiencies[kind] = Efficiency(**changed)
        return replace(self, efficiencies=efficiencies)

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary of all figures."""
        content = {f.name: getattr(self, f.name) for f in fields(self)}
        content["flops"] = dict(self.flops)
        parts = self.efficiencies.items()
        content["overheads"] = asdict(self.overheads)
        content["efficiencies"] = {kind: asdict(part) for kind, part in parts}
        return content


@dataclass(frozen=True, slots=True)
class Measured:
    """One operator and the time it took."""

    kind: str
    flops: float
    n_bytes: float
    dtype: str
    seconds: Seconds


_WORKSTATION = (64 * GIB, 2.0 * GIGA, 3.0 * GIGA)  # RAM; NVMe disk: write, read
_SERVER = (256 * GIB, 2.0 * GIGA, 5.0 * GIGA)
_PCIE = {3: 12.0 * GIGA, 4: 25.0 * GIGA, 5: 52.0 * GIGA}


def _card(
    name: str,
    gib: float,
    gigabytes_per_second: float,
    teraflops: Mapping[str, float],
    pcie: int,
    host: tuple[int, float, float],
    source: str,
) -> Hardware:
    host_bytes, disk_write, disk_read = host
    return Hardware(
        name=name,
        memory_bytes=int(gib * GIB),
        flops={dtype: rate * TERA for dtype, rate in teraflops.items()},
        memory_bandwidth=gigabytes_per_second * GIGA,
        to_host=_PCIE[pcie],
        from_host=_PCIE[pcie],
        host_bytes=host_bytes,
        disk_write=disk_write,
        disk_read=disk_read,
        source=f"{source}; PCIe {pcie} x16, practical rate",
    )


def _rates(
    float32: float, float16: float, tf32: float | None = None, float64: float = 0
) -> dict[str, float]:
    """Name the rates; devices with TF32 have bfloat16 at the rate of float16."""
    rates = {"float32": float32, "float16": float16}
    if tf32 is not None:
        rates |= {"tf32": tf32, "bfloat16": float16}
    if float64:
        rates["float64"] = float64
    return rates


_CARDS = (
    # Its own float16 rate is a 64th; libraries compute float16 in float32 instead.
    _card("gtx1080ti", 11, 484, _rates(11.3, 11.3, float64=0.35), 3, _WORKSTATION,
          "NVIDIA GeForce GTX 1080 Ti specifications"),
    _card("titanv", 12, 653, _rates(14.9, 110, float64=7.45), 3, _WORKSTATION,
          "NVIDIA TITAN V specifications"),
    _card("v100-16g", 16, 900, _rates(15.7, 125, float64=7.8), 3, _SERVER,
          "NVIDIA V100 datasheet, SXM2"),
    _card("v100-32g", 32, 900, _rates(15.7, 125, float64=7.8), 3, _SERVER,
          "NVIDIA V100 datasheet, SXM2"),
    _card("t4", 15, 320, _rates(8.1, 65, float64=0.25), 3, _SERVER,
          "NVIDIA T4 datasheet; 16 GB less what error correction takes"),
    _card("rtx3090", 24, 936, _rates(35.6, 71, 35.6, 0.56), 4, _WORKSTATION,
          "NVIDIA Ampere GA102 whitepaper, float32 accumulation"),
    _card("rtx4090", 24, 1008, _rates(82.6, 165.2, 82.6, 1.29), 4, _WORKSTATION,
          "NVIDIA Ada whitepaper, float32 accumulation"),
    _card("rtx5090", 32, 1792, _rates(104.8, 209.5, 104.8, 1.64), 5, _WORKSTATION,
          "NVIDIA RTX Blackwell whitepaper, float32 accumulation"),
    _card("a10g", 24, 600, _rates(35, 70, 35, 0.55), 4, _SERVER,
          "AWS EC2 G5 figures; NVIDIA A10 datasheet for the memory"),
    _card("a100-40g", 40, 1555, _rates(19.5, 312, 156, 9.7), 4, _SERVER,
          "NVIDIA A100 datasheet, SXM4"),
    _card("a100-80g", 80, 2039, _rates(19.5, 312, 156, 9.7), 4, _SERVER,
          "NVIDIA A100 datasheet, SXM4"),
    _card("l40s", 48, 864, _rates(91.6, 362, 183, 1.43), 4, _SERVER,
          "NVIDIA L40S datasheet"),
    _card("h100", 80, 3350, _rates(67, 989, 495, 34), 5, _SERVER,
          "NVIDIA H100 datasheet, SXM5"),
    _card("h200", 139.8, 4800, _rates(67, 989, 495, 34), 5, _SERVER,
          "NVIDIA H200 datasheet, SXM; 141 GB"),
    _card("mi300x", 192, 5300, _rates(163.4, 1307, 654, 81.7), 5, _SERVER,
          "AMD Instinct MI300X datasheet"),
)  # fmt: skip

CATALOGUE: Mapping[str, Hardware] = MappingProxyType({c.name: c for c in _CARDS})


def find_hardware(name: str) -> Hardware:
    """Find a device by name, however spelled: "RTX 4090", "v100-16g", "A100 80GB".

    "this-machine" is what `lowtide measure` has measured.

    Raises:
        LowtideError: there is none of this name, or several, or nothing was measured.
    """
    wanted = _spelling(name)
    if wanted in ("thismachine", "this"):
        return load_measured()
    matches = [c for c in _CARDS if _spelling(c.name) == wanted]
    if not matches:
        matches = [c for c in _CARDS if wanted and _spelling(c.name).startswith(wanted)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        choice = ", ".join(card.name for card in matches)
        raise LowtideError(f"{name!r} may mean: {choice}. Name one of them.")
    known = ", ".join([*CATALOGUE, MEASURED])
    raise LowtideError(f"{name!r} is no device that lowtide knows. It knows: {known}.")


def _spelling(name: str) -> str:
    short = re.sub(r"[\s_-]+|nvidia|geforce|tesla|instinct|amd", "", name.lower())
    return re.sub(r"(\d)g(i?b)?$", r"\1g", short)


def measured_file() -> Path:
    """Return where `lowtide measure` keeps its figures."""
    folder = os.environ.get("LOWTIDE_CACHE_DIR") or Path.home() / ".cache" / "lowtide"
    return Path(folder) / "hardware.json"


def save_measured(hardware: Hardware, path: Path | None = None) -> Path:
    """Keep what was measured; return the file."""
    target = path or measured_file()
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        draft.write_text(json.dumps(hardware.to_dict(), indent=2) + "\n")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def load_measured(path: Path | None = None) -> Hardware:
    """Read what was measured.

    Raises:
        LowtideError: nothing was, or the file is damaged; says what to do.
    """
    source = path or measured_file()
    try:
        content = json.loads(source.read_text())
    except FileNotFoundError:
        raise LowtideError(
            f"this machine has not been measured ({source} is missing). "
            "Run: lowtide measure"
        ) from None
    except (ValueError, RecursionError):
        raise FileError("is damaged. Run: lowtide measure", path=source) from None
    try:
        return _from_json(content)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        why = f"is damaged ({error}). Run: lowtide measure"
        raise FileError(why, path=source) from None


def _from_json(content: dict[str, Any]) -> Hardware:
    parts = {
        kind: Efficiency(_positive(part["arithmetic"]), _positive(part["traffic"]))
        for kind, part in content.pop("efficiencies").items()
    }
    flops = {dtype: _positive(rate) for dtype, rate in content.pop("flops").items()}
    costs = {name: float(s) for name, s in content.pop("overheads", {}).items()}
    if not all(0 <= seconds < 1 for seconds in costs.values()):
        raise ValueError("its overheads are no seconds")
    for name in ("name", "source"):
        if not isinstance(content[name], str):
            raise ValueError(f"its {name} is no text")
    numbers = {k: v for k, v in content.items() if k not in ("name", "source")}
    for number in numbers.values():
        _positive(number)
    return Hardware(
        **content,
        flops=flops,
        efficiencies={**EFFICIENCIES, **parts},
        overheads=Overheads(**costs),
    )


def _positive(value: float) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is no rate")
    return value


def describe(hardware: Hardware) -> str:
    """Say in a few lines what a device is."""
    rates = ", ".join(
        f"{dtype} {rate / TERA:.3g}" for dtype, rate in hardware.flops.items()
    )
    return (
        f"{hardware.name}: {format_bytes(hardware.memory_bytes)} of memory at "
        f"{hardware.memory_bandwidth / GIGA:.4g} GB/s\n"
        f"  TFLOP/s    {rates}\n"
        f"  link       {hardware.to_host / GIGA:.3g} GB/s out, "
        f"{hardware.from_host / GIGA:.3g} GB/s in\n"
        f"  host       {format_bytes(hardware.host_bytes)}; disk "
        f"{hardware.disk_write / GIGA:.3g} GB/s out, "
        f"{hardware.disk_read / GIGA:.3g} GB/s in\n"
        f"  source     {hardware.source}\n"
    )
