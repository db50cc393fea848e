"""The denoiser's signal processing, and its output beside the reference runtime's."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from bench import denoise
from tvmfuse.errors import UsageError


def test_synthesis_undoes_analysis() -> None:
    audio = denoise.clip(0.5)
    again = denoise.synthesise(denoise.analyse(audio))
    assert len(again) == len(audio) - denoise.HOP
    np.testing.assert_allclose(again, audio[: len(again)], atol=1e-6)


def test_the_window_is_power_complementary() -> None:
    w = denoise.window().astype(np.float64)
    np.testing.assert_allclose(w[: denoise.HOP] ** 2 + w[denoise.HOP :] ** 2, 1, atol=1e-6)


def test_bands_cover_every_bin_once() -> None:
    widths = denoise.band_widths()
    assert (len(widths), widths.sum(), widths.min()) == (denoise.BANDS, denoise.BINS, denoise.MIN_BAND_BINS)
    assert (np.diff(widths) >= 0).all()


def test_running_means_start_from_their_initial_state() -> None:
    means = denoise.smoothed(np.ones((3, 1), np.float32), np.array([0.0]))
    np.testing.assert_allclose(means[:, 0], [0.01, 0.0199, 0.029701], rtol=1e-5)


def test_gains_and_filters_reach_the_frame_that_they_are_meant_for() -> None:
    """Decoders that halve every band, and filter the low bins by a quarter of the frame itself."""

    def build(name: str, frames: int) -> denoise.Network:
        if name == "enc":
            return lambda feeds: dict.fromkeys(("emb", "c0", "e0", "e1", "e2", "e3"), np.zeros(1))
        if name == "erb_dec":
            return lambda feeds: {"m": np.full((1, 1, frames, denoise.BANDS), 0.5, np.float32)}
        taps = np.zeros((1, frames, denoise.DF_BINS, denoise.DF_ORDER, 2), np.float32)
        taps[..., denoise.DF_ORDER - 1 - denoise.LOOKAHEAD, 0] = 0.25
        return lambda feeds: {"coefs": taps.reshape(1, frames, denoise.DF_BINS, -1)}

    audio = denoise.clip(0.2)
    out = denoise.denoise(audio, build)
    gains = np.full(denoise.BINS, 0.5, np.float32)
    gains[: denoise.DF_BINS] = 0.25
    padded = np.concatenate([audio, np.zeros(denoise.HOP, np.float32)])
    expected = denoise.synthesise(denoise.analyse(padded) * gains)[: len(audio)]
    assert len(out) == len(audio)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_wav_files_keep_their_samples(tmp_path: Path) -> None:
    audio = np.stack([denoise.clip(0.1), -denoise.clip(0.1, seed=1)])
    denoise.write_wav(tmp_path / "a.wav", audio)
    assert [p.name for p in tmp_path.iterdir()] == ["a.wav"]
    np.testing.assert_allclose(denoise.read_wav(tmp_path / "a.wav"), audio, atol=1 / 65536)


def test_files_that_are_no_such_wav_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    for path in (tmp_path / "a.wav", tmp_path / "absent.wav"):
        with pytest.raises(UsageError, match="can't be read as WAV"):
            denoise.read_wav(path)


def test_a_wav_without_samples_is_refused(tmp_path: Path) -> None:
    denoise.write_wav(tmp_path / "a.wav", np.zeros((1, 0)))
    with pytest.raises(UsageError, match="no samples"):
        denoise.read_wav(tmp_path / "a.wav")


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_folder_that_is_absent_is_one_error_and_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't write"):
        denoise.write_wav(tmp_path / "absent" / "a.wav", np.zeros((1, 1)))
    gc.collect()


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_clip_of_no_length_is_a_usage_error(seconds: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["denoise", f"--seconds={seconds}"])
    with pytest.raises(SystemExit, match="2"):
        denoise.main()
    assert f"--seconds {seconds}: " in capsys.readouterr().err


def test_the_ratio_is_finite_for_silence() -> None:
    assert np.isfinite(denoise.snr_db(np.zeros(4), np.full(4, 1e-9)))
    assert np.isfinite(denoise.snr_db(np.zeros(4), np.zeros(4)))


def test_output_agrees_with_the_reference_runtime() -> None:
    audio = denoise.clip(1.5)
    try:
        reference = denoise.Reference()
    except UsageError as error:
        pytest.skip(str(error))
    with reference:
        expected, _ = reference.denoise(audio)
    assert denoise.snr_db(audio, expected) < 20, "the reference does something"
    assert denoise.snr_db(expected, denoise.denoise(audio, denoise.tvmfuse_networks(2))) > 50
