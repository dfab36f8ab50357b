"""Key files of engines and frontends."""

import re
import stat
from pathlib import Path

import pytest
import zmq

from tandem.protocol.curve import CLIENTS, Curve, KeyPair, load_curve, load_key, make_client, make_curve


def test_key_files_are_readable_only_by_their_owner(tmp_path: Path) -> None:
    public, secret = make_curve(tmp_path / "keys")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert (public.name, secret.name) == ("engine.key", "engine.key_secret")


def test_load_curve_reads_the_secret_only_from_the_secret_file(tmp_path: Path) -> None:
    _, secret = make_curve(tmp_path)
    engine = load_curve(tmp_path)
    assert engine.secret is not None
    assert zmq.curve_public(engine.secret) == engine.public
    secret.unlink()
    assert load_curve(tmp_path) == Curve(engine.public, None, None, tmp_path / CLIENTS)
    assert load_curve(tmp_path, any_client=True) == Curve(engine.public)


def test_new_keys_differ(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_curve(tmp_path / name)
    assert load_curve(tmp_path / "a").public != load_curve(tmp_path / "b").public


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_load_curve_without_key_files_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"tandem keys"):
        load_curve(tmp_path / name)


@pytest.mark.parametrize("text", ["", "nonsense", 'curve\n    public-key = "short"\n'])
def test_load_curve_of_a_malformed_key_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "engine.key").write_text(text)
    with pytest.raises(ValueError, match=r"engine\.key|[Kk]ey"):
        load_curve(tmp_path)


class TestClients:
    def test_a_client_gets_a_folder_and_the_engine_its_public_key(self, tmp_path: Path) -> None:
        make_curve(tmp_path)
        accepted, folder = make_client(tmp_path, "web-1")
        assert accepted == tmp_path / CLIENTS / "web-1.key"
        assert sorted(path.name for path in folder.iterdir()) == ["client.key_secret", "engine.key"]
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in (accepted, *folder.iterdir()))
        frontend, engine = load_curve(folder), load_curve(tmp_path)
        assert frontend.client is not None
        assert load_key(accepted) == (frontend.client.public, None)
        assert zmq.curve_public(frontend.client.secret) == frontend.client.public
        assert (frontend.public, frontend.secret) == (engine.public, None)
        assert engine.clients == tmp_path / CLIENTS
        assert [path.name for path in (tmp_path / CLIENTS).iterdir()] == ["web-1.key"]

    def test_names_are_used_once(self, tmp_path: Path) -> None:
        make_curve(tmp_path)
        make_client(tmp_path, "a")
        with pytest.raises(FileExistsError):
            make_client(tmp_path, "a")
        assert load_key(make_client(tmp_path, "b")[0]) != load_key(tmp_path / CLIENTS / "a.key")

    @pytest.mark.parametrize("name", ["", "..", "a/b", "-x", "x" * 65, "a b", "a\n"])
    def test_names_that_are_no_file_names_are_refused(self, tmp_path: Path, name: str) -> None:
        make_curve(tmp_path)
        with pytest.raises(ValueError, match=re.escape(repr(name)[:20])):
            make_client(tmp_path, name)

    def test_a_client_needs_the_keys_of_an_engine(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"engine\.key; .*`tandem keys"):
            make_client(tmp_path, "a")

    def test_a_client_of_keys_from_before_there_were_clients(self, tmp_path: Path) -> None:
        make_curve(tmp_path)
        (tmp_path / CLIENTS).rmdir()
        assert make_client(tmp_path, "a")[0].is_file()

    def test_a_public_key_instead_of_the_secret_one_is_an_error(self, tmp_path: Path) -> None:
        make_curve(tmp_path)
        accepted, folder = make_client(tmp_path, "a")
        (folder / "client.key_secret").write_bytes(accepted.read_bytes())
        with pytest.raises(ValueError, match=r"client\.key_secret"):
            load_curve(folder)


class TestClientPair:
    def test_own_keys_come_first(self) -> None:
        own = KeyPair(*zmq.curve_keypair())
        assert Curve(*zmq.curve_keypair(), own).client_pair() == own

    def test_a_process_with_the_secret_key_connects_as_the_engine(self) -> None:
        engine = Curve(*zmq.curve_keypair())
        pair = engine.client_pair()
        assert (pair.public, pair.secret) == (engine.public, engine.secret)

    def test_a_process_without_keys_makes_new_ones(self) -> None:
        curve = Curve(zmq.curve_keypair()[0])
        assert curve.client_pair() != curve.client_pair()
