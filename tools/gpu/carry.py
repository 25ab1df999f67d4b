"""Packs what a GPU machine without a network must be given, in pieces that one call can carry.

    python -m tools.gpu.carry WHEEL … --out FOLDER [--capability 90] [--mib 55]

The demo target goes with them. Of each wheel's CUDA libraries only the machine code for one
capability is kept, where there is some: the other code is zeros, which the new wheel has no room
for. FOLDER/1, FOLDER/2, … are carried one a call, and copied out of the checkout there; then
`cat */piece-* | tar x` gives the wheels, and the target at its place in the cache.
"""

import argparse
import io
import struct
import tarfile
import zipfile
from pathlib import Path

from spec_export.model import demo

REGION = struct.pack("<I", 0xBA55ED50)  # begins a fatbinary: u16 version, u16 header, u64 size
ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, bytes of header and of code, capability


def cut(library: bytes, capability: int) -> bytes:
    """Returns a library of the same size whose fatbinaries have the code of one capability.

    Fatbinaries without any, such as those of intermediate code, stay as they are.
    """
    data, at = bytearray(library), library.find(REGION)
    while at >= 0:
        _, header, size = struct.unpack_from("<HHQ", data, at + 4)
        begin, end = at + header, at + header + size
        place, kept = begin, bytearray()
        while begin <= place < end <= len(data):
            _, _, own, length, made_for = ENTRY.unpack_from(data, place)
            if made_for == capability:
                kept += data[place : place + own + length]
            place += max(own + length, 1)
        if kept and place == end:
            data[begin:end] = kept.ljust(size, b"\0")
            struct.pack_into("<Q", data, at + 8, len(kept))
        at = data.find(REGION, end if place == end else at + 1)
    return bytes(data)


def smaller(wheel: Path, capability: int) -> bytes:
    """Returns a wheel with cut libraries. pip does not compare their hashes with its RECORD."""
    out = io.BytesIO()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, cut(content, capability) if "cuda" in name else content)
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--mib", type=int, default=55, help="of a piece")
    args = parser.parse_args()
    files = {f"wheels/{wheel.name}": smaller(wheel, args.capability) for wheel in args.wheels}
    target, packed = demo.fetch(), io.BytesIO()
    files[f"cache/specsplit/{target.name}"] = target.read_bytes()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in files.items():
            print(f"{name}: {len(content) / 2**20:.1f} MiB")
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    packed.seek(0)
    for i, piece in enumerate(iter(lambda: packed.read(args.mib << 20), b""), 1):
        (args.out / str(i)).mkdir(parents=True)
        (args.out / str(i) / f"piece-{i:02}").write_bytes(piece)
    print(f"{i} calls")


if __name__ == "__main__":
    main()
