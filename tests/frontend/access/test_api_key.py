"""API keys, and the ring of those in force."""

from tandem.frontend.access.api_key import API_KEY, ApiKey, KeyLimits, KeyRing, Right, api_key, digest_of, key_name
from tandem.frontend.access.api_key import unnamed_key as unnamed


def test_a_ring_finds_a_key_by_its_secret_alone() -> None:
    keys = [unnamed("first"), ApiKey("bob", digest_of(b"second"), frozenset(Right), KeyLimits(3))]
    ring = KeyRing(keys)
    assert [ring.find(secret) for secret in (b"first", b"second")] == keys
    for secret in (b"", b"First", b"first ", b"x" * 10_000, keys[1].digest, keys[1].digest.hex().encode()):
        assert ring.find(secret) is None
    assert len(ring) == 2 and ring.names == {keys[0].name, "bob"}


def test_a_request_without_a_key_has_none_though_one_of_an_empty_text_is_given() -> None:
    assert KeyRing([ApiKey("ghost", digest_of(b""), frozenset(Right))]).find(b"") is None


def test_a_key_without_a_name_is_named_by_its_digest_and_may_generate() -> None:
    key = unnamed("secret")
    assert key.name == "key-" + digest_of(b"secret").hex()[:8]
    assert key.owner == digest_of(b"secret").hex()
    assert key.rights == {Right.GENERATE} and key.limits == KeyLimits()


def test_the_scope_has_the_key_of_a_request() -> None:
    key = unnamed("secret")
    assert api_key({API_KEY: key}) is key and key_name({API_KEY: key}) == key.name
    assert api_key({}) is None and key_name({}) == ""
