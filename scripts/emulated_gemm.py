"""What a compiled `common_ops` library of sglang-kernel does with `cutlass_w4a8_moe_mm`, read without a GPU.

The host code that chooses a tile is run in an emulator with tensors of given sizes, up to the launcher that it jumps to; the
launcher's code names the kernel that it launches. So limits and tiles are those of the binary, whatever its source says.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import capstone
import numpy as np
import unicorn
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection
from unicorn import x86_const as x86

ENTRY = "_Z24cutlass_w4a8_moe_mm_sm90"
# The code that chooses lies around its entry, the launchers behind it: this far in front of it, in bytes.
_BEFORE = 0x1800
# Between the two addresses that one registration of a kernel takes, in bytes.
_REGISTRATION = 48
# Of one launcher; the next begins behind it.
_LAUNCHER = 0x3800
_PAGE = 0x1000
_SCRATCH, _STACK, _RETURN = 0x7000_0000, 0x7800_0000, 0x7FFF_0000
# Where a c10::TensorImpl keeps its number of dimensions (the sizes follow) and its device (type, index, whether it is set), by
# the torch that a library is built for: 2.13 and 2.14, then 2.11.
_LAYOUTS = ((0x38, 0xA2), (0x40, 0xAA))
_CUDA = 1
_STEPS_MAX = 20_000


class UnreadableError(Exception):
    """The library's code is not as this reader expects; the message says where."""


@dataclass(frozen=True)
class Branch:
    """The tiles of one (n, k) by the dispatch's `m`: `limits` are the last `m` of every kernel but the last."""

    limits: tuple[int, ...]
    kernels: tuple[str, ...]


class CompiledGemm:
    """The grouped GEMM of one library."""

    def __init__(self, path: Path) -> None:
        self.image = path.read_bytes()
        with path.open("rb") as file:
            elf = ELFFile(file)
            self.segments = [
                (s["p_vaddr"], s["p_offset"], s["p_filesz"], s["p_memsz"])
                for s in elf.iter_segments()
                if s["p_type"] == "PT_LOAD"
            ]
            symbols = elf.get_section_by_name(".dynsym")
            entries = [s for s in symbols.iter_symbols() if s.name.startswith(ENTRY)]
            if len(entries) != 1:
                raise UnreadableError(f"{path}: {len(entries)} functions {ENTRY}, must be one")
            self.entry, self.entry_size = entries[0]["st_value"], entries[0]["st_size"]
            text = elf.get_section_by_name(".text")
            self.text = range(text["sh_addr"], text["sh_addr"] + text["sh_size"])
            stubs = elf.get_section_by_name(".rela.plt")
            assert isinstance(stubs, RelocationSection)
            self.imports = {
                relocation["r_offset"]: symbols.get_symbol(relocation["r_info_sym"]).name
                for relocation in stubs.iter_relocations()
                if relocation["r_info_sym"]
            }
        self.kernels = self._host_functions()
        self.disassembler = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
        self.disassembler.detail = True
        self._launchers: dict[int, str] = {}
        self._emulator = self._load()
        self._layout = self._find_layout()

    def tiles(self) -> list[str]:
        """Names of all kernels of the grouped GEMM that the library holds, mangled."""
        return sorted(set(self.kernels.values()))

    def _addresses_taken(self) -> list[tuple[int, int]]:
        """Every `lea register, [rip + x]` of the code, as (where it stands, the address that it takes)."""
        start = self._offset(self.text.start)
        code = np.frombuffer(self.image, dtype=np.uint8, count=len(self.text), offset=start)
        is_lea = ((code[:-6] & 0xFB) == 0x48) & (code[1:-5] == 0x8D) & ((code[2:-4] & 0xC7) == 0x05)
        places = np.flatnonzero(is_lea)
        low = sum(code[places + 3 + byte].astype(np.int64) << (8 * byte) for byte in range(4))
        distances = np.where(low >= 1 << 31, low - (1 << 32), low)
        addresses = places + self.text.start
        return list(zip(addresses.tolist(), (addresses + 7 + distances).tolist(), strict=True))

    def _host_functions(self) -> dict[int, str]:
        """The host function that stands for each kernel of the grouped GEMM, as the library registers them: address -> name."""
        names = {}
        for match in re.finditer(rb"_ZN7cutlass13device_kernel\w*MixedInput\w*", self.image):
            names[self._address(match.start())] = match[0].decode()
        taken = self._addresses_taken()
        functions = {}
        for index, (place, target) in enumerate(taken):
            if target not in names:
                continue
            # A registration takes both addresses side by side: the name's and the function's.
            near = [entry for entry in taken[max(0, index - 3) : index + 4] if entry[1] in self.text]
            nearest = min(near, key=lambda entry: abs(entry[0] - place), default=None)
            if nearest is not None and abs(nearest[0] - place) < _REGISTRATION:
                functions[nearest[1]] = names[target]
        if set(functions.values()) != set(names.values()):
            raise UnreadableError(f"{len(names)} kernels, of which {len(functions)} are registered")
        return functions

    def branch(self, n: int, k: int, gpu: str, last: int = 1 << 17) -> Branch:
        """The kernels for one (n, k) over every `m` from 1 to `last`."""
        chosen = {m: self.kernel(m, n, k, gpu) for m in (1, last)}

        def split(low: int, high: int) -> Iterator[int]:
            # The kernel is a step function of `m` whose steps are at powers of two in every known version, but any are found
            # as long as no kernel comes back within one octave.
            if chosen[low] == chosen[high]:
                return
            if high - low == 1:
                yield low
                return
            middle = (low + high) // 2
            chosen[middle] = self.kernel(middle, n, k, gpu)
            yield from split(low, middle)
            yield from split(middle, high)

        octaves = [1 << power for power in range(last.bit_length())]
        for m in octaves:
            chosen[m] = self.kernel(m, n, k, gpu)
        limits = [limit for low, high in itertools.pairwise(octaves) for limit in split(low, high)]
        return Branch(tuple(limits), tuple(chosen[m] for m in (*limits, last)))

    def kernel(self, m: int, n: int, k: int, gpu: str) -> str:
        """The mangled name of the kernel that a call with 2-D tensors `a` [m, k] and `d` [m, n], `topk` 1, launches."""
        emulator, (dimensions, device) = self._emulator, self._layout
        tensors = _SCRATCH
        emulator.mem_write(_SCRATCH, bytes(16 * _PAGE))
        impls = {"d": (m, n), "a": (m, k)}
        for index, sizes in enumerate((impls["d"], impls["a"], *[(1, 1)] * 8)):
            impl = _SCRATCH + _PAGE * (index + 1)
            emulator.mem_write(tensors + 8 * index, impl.to_bytes(8, "little"))
            emulator.mem_write(impl + dimensions, (2).to_bytes(8, "little"))
            for axis, size in enumerate(sizes):
                emulator.mem_write(impl + dimensions + 8 * (axis + 1), size.to_bytes(8, "little"))
            emulator.mem_write(impl + device, bytes([_CUDA, 0, 1]))
        name = _SCRATCH + _PAGE * 12
        emulator.mem_write(name, gpu.encode() + b"\0")
        stack = _STACK + 8 * _PAGE
        pointers = [tensors + 8 * index for index in range(10)]
        registers = (
            x86.UC_X86_REG_RDI,
            x86.UC_X86_REG_RSI,
            x86.UC_X86_REG_RDX,
            x86.UC_X86_REG_RCX,
            x86.UC_X86_REG_R8,
            x86.UC_X86_REG_R9,
        )
        for register, pointer in zip(registers, pointers, strict=False):
            emulator.reg_write(register, pointer)
        # d, a, b, a_scales, b_scales and the offsets are in registers; the sizes and four strides on the stack.
        words = [_RETURN, *pointers[5:10], 128, 1]
        for index, word in enumerate(words):
            emulator.mem_write(stack + 8 * index, word.to_bytes(8, "little"))
        emulator.reg_write(x86.UC_X86_REG_RSP, stack)
        self._gpu_name, self._reached, self._stranger = name, None, ""
        try:
            emulator.emu_start(self.entry, _RETURN, count=_STEPS_MAX)
        except unicorn.UcError as error:
            where = emulator.reg_read(x86.UC_X86_REG_RIP)
            raise UnreadableError(f"m {m}, n {n}, k {k}: the emulator stopped at {where:#x}: {error}") from error
        if self._stranger or self._reached is None:
            reason = (
                f"the code that chooses a tile calls {self._stranger}" if self._stranger else "no launcher was reached"
            )
            raise UnreadableError(f"m {m}, n {n}, k {k}: {reason}")
        return self._kernel_of(self._reached)

    def _find_layout(self) -> tuple[int, int]:
        error: UnreadableError | None = None
        for self._layout in _LAYOUTS:
            try:
                self.kernel(1, 512, 512, "")  # a wrong place would hold 1 dimension, too few
                return self._layout
            except UnreadableError as found:
                error = found
        raise UnreadableError(f"no known layout of a tensor fits: {error}")

    def _load(self) -> unicorn.Uc:
        emulator = unicorn.Uc(unicorn.UC_ARCH_X86, unicorn.UC_MODE_64)
        for address, offset, in_file, in_memory in self.segments:
            first, last = address // _PAGE * _PAGE, -(-(address + in_memory) // _PAGE) * _PAGE
            emulator.mem_map(first, last - first)
            emulator.mem_write(address, self.image[offset : offset + in_file])
        for base, size in ((_SCRATCH, 16 * _PAGE), (_STACK, 16 * _PAGE), (_RETURN, _PAGE)):
            emulator.mem_map(base, size)
        self._stubs: dict[int, str | None] = {}
        emulator.hook_add(unicorn.UC_HOOK_CODE, self._step)
        return emulator

    def _import_at(self, emulator: unicorn.Uc, address: int) -> str | None:
        """The imported function whose stub lies at an address outside of the code proper."""
        if address not in self._stubs:
            code = bytes(emulator.mem_read(address, 16))
            self._stubs[address] = None
            for instruction in itertools.islice(self.disassembler.disasm(code, address), 2):
                if instruction.mnemonic in ("jmp", "bnd jmp") and "rip" in instruction.op_str:
                    slot = instruction.address + instruction.size + instruction.disp
                    self._stubs[address] = self.imports.get(slot)
        return self._stubs[address]

    def _step(self, emulator: unicorn.Uc, address: int, size: int, data: object) -> None:
        if self.entry - _BEFORE <= address < self.entry + self.entry_size + _PAGE // 4:
            return
        if address not in self.text:
            name = self._import_at(emulator, address)
            if name is None:
                return
            emulator.reg_write(x86.UC_X86_REG_RAX, self._call(emulator, name))
            stack = emulator.reg_read(x86.UC_X86_REG_RSP)
            back = int.from_bytes(emulator.mem_read(stack, 8), "little")
            emulator.reg_write(x86.UC_X86_REG_RSP, stack + 8)
            emulator.reg_write(x86.UC_X86_REG_RIP, back)
            return
        self._reached = address
        emulator.emu_stop()

    def _call(self, emulator: unicorn.Uc, name: str) -> int:
        """What an imported function returns."""
        first, second, third = (
            emulator.reg_read(register) for register in (x86.UC_X86_REG_RDI, x86.UC_X86_REG_RSI, x86.UC_X86_REG_RDX)
        )
        if "getCurrentDeviceProperties" in name:
            return self._gpu_name  # the struct begins with the name
        if name == "strlen":
            return bytes(emulator.mem_read(first, 256)).index(0)
        if name == "memchr":
            found = bytes(emulator.mem_read(first, third)).find(bytes([second & 0xFF]))
            return first + found if found >= 0 else 0
        if name.startswith(("_ZN3c104cuda", "_ZNK3c104cuda")):
            return 0
        # An exception would not get through the emulator.
        self._stranger = name
        emulator.emu_stop()
        return 0

    def _kernel_of(self, launcher: int) -> str:
        """The kernel whose address a launcher loads."""
        if launcher not in self._launchers:
            code = self.image[self._offset(launcher) :][:_LAUNCHER]
            found = None
            for instruction in self.disassembler.disasm(code, launcher):
                if instruction.mnemonic == "lea" and "rip" in instruction.op_str:
                    found = self.kernels.get(instruction.address + instruction.size + instruction.disp)
                    if found:
                        break
            if found is None:
                raise UnreadableError(f"the launcher at {launcher:#x} names no kernel")
            self._launchers[launcher] = found
        return self._launchers[launcher]

    def _address(self, place: int) -> int:
        for start, offset, in_file, _ in self.segments:
            if offset <= place < offset + in_file:
                return start + place - offset
        raise UnreadableError(f"nothing loads byte {place:#x} of the file")

    def _offset(self, address: int) -> int:
        for start, offset, in_file, _ in self.segments:
            if start <= address < start + in_file:
                return offset + address - start
        raise UnreadableError(f"address {address:#x} is not in the file")
