"""A system-call filter for the sandbox: calls that no program of a model needs are refused with
EPERM.

Second line of defence behind the namespaces: kernel interfaces that are not namespaced, or that
reach into the supervisor, or whose memory no process is charged for. The program is classic BPF
(`linux/filter.h`), assembled here since the usual machines have no library for it.
"""

import ctypes
import errno
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_LOAD, _JUMP, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = (
    0x20,
    0x05,
    0x15,
    0x35,
    0x45,
    0x06,
)
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_X32_BIT = 0x40000000
_NAMESPACE_FLAGS = 0x7E020000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_SOL_SOCKET, _BUFFER_SIZES = 1, (7, 8, 32, 33)
"""SO_SNDBUF, SO_RCVBUF and their FORCE variants: a socket's buffers keep the kernel's default size."""
_CLONE_THREAD = 0x10000
_CHANGES = 0o1 | 0o2 | 0o100 | 0o1000
"""O_WRONLY, O_RDWR, O_CREAT and O_TRUNC."""
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET and AF_INET6: the others (netlink, packet, vsock) are refused."""


_DENIED = """
acct 163 89
add_key 248 217
adjtimex 159 171
bpf 321 280
chroot 161 51
clock_adjtime 305 266
clock_settime 227 112
create_module 174 -
delete_module 176 106
fanotify_init 300 262
finit_module 313 273
fsconfig 431 431
fsmount 432 432
fsopen 430 430
fspick 433 433
get_kernel_syms 177 -
init_module 175 105
inotify_init 253 -
inotify_init1 294 26
io_setup 206 0
io_uring_enter 426 426
io_uring_register 427 427
io_uring_setup 425 425
ioperm 173 -
iopl 172 -
ioprio_set 251 30
kcmp 312 272
kexec_file_load 320 294
kexec_load 246 104
keyctl 250 219
lookup_dcookie 212 18
memfd_create 319 279
memfd_secret 447 447
migrate_pages 256 238
modify_ldt 154 -
mount 165 40
mount_setattr 442 442
move_mount 429 429
move_pages 279 239
mq_open 240 180
msgctl 71 187
msgget 68 186
msgrcv 70 188
msgsnd 69 189
name_to_handle_at 303 264
nfsservctl 180 42
open_by_handle_at 304 265
open_tree 428 428
perf_event_open 298 241
personality 135 92
pidfd_getfd 438 438
pivot_root 155 41
process_madvise 440 440
process_vm_readv 310 270
process_vm_writev 311 271
ptrace 101 117
query_module 178 -
quotactl 179 60
quotactl_fd 443 443
reboot 169 142
request_key 249 218
semctl 66 191
semget 64 190
semop 65 193
semtimedop 220 192
setdomainname 171 162
sethostname 170 161
setns 308 268
settimeofday 164 170
shmat 30 196
shmctl 31 195
shmdt 67 197
shmget 29 194
swapoff 168 225
swapon 167 224
sysfs 139 -
syslog 103 116
umount2 166 39
unshare 272 97
uselib 134 -
userfaultfd 323 282
ustat 136 -
vhangup 153 58
vmsplice 278 75
"""
"""Name, number on x86_64, number on aarch64: System V IPC, tracing, mounts, modules, clocks, keys,
io_uring, bpf, and other ways around namespaces and accounting."""

_DENIED_TO_CHECKS = """
accept 43 202
accept4 288 242
bind 49 200
chmod 90 -
chown 92 -
connect 42 203
creat 85 -
execve 59 221
execveat 322 281
fchmod 91 52
fchmodat 268 53
fchmodat2 452 452
fchown 93 55
fchownat 260 54
fork 57 -
fsetxattr 190 7
futimesat 261 -
kill 62 129
lchown 94 -
link 86 -
linkat 265 37
listen 50 201
lsetxattr 189 6
mkdir 83 -
mkdirat 258 34
mknod 133 -
mknodat 259 33
openat2 437 437
pidfd_open 434 434
pidfd_send_signal 424 424
rename 82 -
renameat 264 38
renameat2 316 276
rmdir 84 -
rt_sigqueueinfo 129 138
rt_tgsigqueueinfo 297 240
setxattr 188 5
socket 41 198
socketpair 53 199
symlink 88 -
symlinkat 266 36
tkill 200 130
truncate 76 45
unlink 87 -
unlinkat 263 35
utimensat 280 88
utimes 235 -
vfork 58 -
"""
"""Calls that a check of an answer needs even less: other processes, connections, changes of files."""


@dataclass(frozen=True, slots=True)
class _Architecture:
    """An architecture's `linux/audit.h` number, and calls allowed with some arguments only."""

    audit: int
    column: int
    own_only: tuple[int, ...]
    """sched_setparam, sched_setscheduler, sched_setaffinity, prlimit64, sched_setattr: for process
    0, the caller, alone."""
    set_priority: int
    clone: int
    clone3: int
    socket: int
    socketpair: int
    setsockopt: int
    opens: tuple[tuple[int, int], ...]
    """open and openat, with the place of their flags."""

    def numbers(self, table: str) -> tuple[int, ...]:
        rows = [line.split() for line in table.split("\n") if line]
        return tuple(int(row[self.column]) for row in rows if row[self.column] != "-")


_ARCHITECTURES = {
    "x86_64": _Architecture(
        audit=0xC000003E,
        column=1,
        own_only=(142, 144, 203, 302, 314),
        set_priority=141,
        clone=56,
        clone3=435,
        socket=41,
        socketpair=53,
        setsockopt=54,
        opens=((2, 1), (257, 2)),
    ),
    "aarch64": _Architecture(
        audit=0xC00000B7,
        column=2,
        own_only=(118, 119, 122, 261, 274),
        set_priority=140,
        clone=220,
        clone3=435,
        socket=198,
        socketpair=199,
        setsockopt=208,
        opens=((56, 2),),
    ),
}


def program(machine: str | None = None, *, is_check: bool = False) -> bytes | None:
    """Return the filter for this machine's architecture; None where its call numbers are
    unknown.

    With `is_check` it is that of a process that only computes: it starts no other, connects to nothing
    and changes no file.
    """
    known = _ARCHITECTURES.get(machine or platform.machine())
    if known is None:
        return None
    refuse = [_instruction(_RETURN, _ERRNO | errno.EPERM)]
    code = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_JUMP_EQUAL, known.audit, yes=1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
        _instruction(_JUMP_AT_LEAST, _X32_BIT, no=1),
        *refuse,
    ]
    denied = known.numbers(_DENIED) + (known.numbers(_DENIED_TO_CHECKS) if is_check else ())
    for number in denied:
        code += [_instruction(_JUMP_EQUAL, number, no=1), *refuse]
    code += [
        _instruction(_JUMP_EQUAL, known.clone3, no=1),  # its flags cannot be seen: use clone
        _instruction(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    for number in known.own_only:
        code += _when(number, [_argument(0), _instruction(_JUMP_EQUAL, 0, yes=1), *refuse])
    code += _when(
        known.set_priority,
        [
            _argument(0),
            _instruction(_JUMP_EQUAL, 0, no=2),
            _argument(1),
            _instruction(_JUMP_EQUAL, 0, yes=1),
            *refuse,
        ],
    )
    no_process = [_instruction(_JUMP_ANY_BIT, _CLONE_THREAD, yes=1), *refuse] if is_check else []
    no_namespace = [_instruction(_JUMP_ANY_BIT, _NAMESPACE_FLAGS, no=1), *refuse]
    code += _when(known.clone, [_argument(0), *no_process, *no_namespace])
    for number, place in known.opens if is_check else ():
        body = [_argument(place), _instruction(_JUMP_ANY_BIT, _CHANGES, no=1), *refuse]
        code += _when(number, body)
    for call in (known.socket, known.socketpair):
        code += _when(call, [_argument(0), *_unless(_FAMILIES), *refuse])
    sizes = _unless(_BUFFER_SIZES)
    other_level = _instruction(_JUMP_EQUAL, _SOL_SOCKET, no=len(sizes) + 3)
    code += _when(
        known.setsockopt,
        [_argument(1), other_level, _argument(2), *sizes, _instruction(_JUMP, 1), *refuse],
    )
    code.append(_instruction(_RETURN, _ALLOW))
    return b"".join(code)


def confine() -> bool:
    """Apply the filter of checks to this process and what it starts, for good; return whether it could be.

    The kernel may lack filters, and other threads must not run yet.
    """
    made = program(is_check=True)
    if made is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(made, len(made))
    length = len(made) // struct.calcsize("=HBBI")
    filter_program = ctypes.create_string_buffer(struct.pack("@HP", length, ctypes.addressof(code)))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filter_program, 0, 0) == 0


def _when(number: int, body: list[bytes]) -> list[bytes]:
    """Return `body` for one system call only; it either refuses or falls through to an end that
    allows."""
    whole = [*body, _instruction(_RETURN, _ALLOW)]
    return [_instruction(_JUMP_EQUAL, number, no=len(whole)), *whole]


def _unless(values: Sequence[int]) -> list[bytes]:
    """Return jumps over the next instruction, for a loaded value among `values`."""
    return [
        _instruction(_JUMP_EQUAL, value, yes=len(values) - place)
        for place, value in enumerate(values)
    ]


def _argument(index: int) -> bytes:
    return _instruction(_LOAD, _ARGUMENTS + 8 * index)


def _instruction(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)
