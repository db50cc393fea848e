"""Every error a person can meet, each with the exit code that the command line gives it."""

from __future__ import annotations


class TvmfuseError(Exception):
    """Base of all errors raised on purpose: the message says what, where and what to do.

    command_line  the message with options in place of arguments, where it names any.
    """

    exit_code = 1

    def __init__(self, message: str, command_line: str | None = None) -> None:
        super().__init__(message)
        self.command_line = command_line or message


class UsageError(TvmfuseError, ValueError):
    """An argument makes no sense: unknown input name, wrong shape, malformed budget."""

    exit_code = 2


class ModelError(TvmfuseError, ValueError):
    """The model file is damaged, is not ONNX, or leaves a dimension unbound."""

    exit_code = 3


class UnsupportedError(TvmfuseError):
    """The model is well formed but uses operators that can't be compiled."""

    exit_code = 4


class TargetMismatch(TvmfuseError):
    """An artifact or a record needs a CPU feature or a toolchain that is not here."""

    exit_code = 5


class TooNoisy(TvmfuseError):
    """The A/A control is too unsteady for any verdict."""

    exit_code = 6


class DeviceError(TvmfuseError):
    """What runs on a measuring device failed, died or does not answer; or somebody else is measuring there."""

    exit_code = 7


class DeviceLost(TvmfuseError):
    """A device is gone as a whole, or none is there: unlike a DeviceError this says nothing about the kernel that it had."""

    exit_code = 7


class CheckFailed(TvmfuseError):
    """A regression check found a difference."""

    exit_code = 8


class WrongBits(CheckFailed):
    """A model's output bits depend on its placements: a fault of this package, never of a device or a model."""


class ScheduleRefused(TvmfuseError):
    """A candidate is not legal for its workload on this machine; the message says why."""
