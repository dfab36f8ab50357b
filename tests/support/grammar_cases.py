"""JSON schemas and regular expressions of many kinds, by name."""

from typing import Any

OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": False}


def record(**properties: Any) -> dict[str, Any]:
    return OBJECT | {"properties": properties, "required": list(properties)}


WORD = {"type": "string", "pattern": "^[a-z]{1,6}$"}

SCHEMAS: dict[str, dict[str, Any] | bool] = {
    "empty object": OBJECT,
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "small integer": {"type": "integer", "minimum": 0, "maximum": 9},
    "wide integer": {"type": "integer", "minimum": -1_000_000, "maximum": 123_456_789},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 5},
    "number in a range": {"type": "number", "minimum": 0.5, "maximum": 2.25},
    "multiple of": {"type": "integer", "multipleOf": 25, "minimum": 0, "maximum": 1000},
    "enum of strings": {"enum": ["red", "green", "blue", "", "a longer one with spaces"]},
    "enum of anything": {"enum": [1, "1", None, True, [1, 2], {"k": "v"}]},
    "const": {"const": {"kind": "fixed", "n": [1, 2.5, None]}},
    "short string": {"type": "string", "maxLength": 5},
    "string of at least": {"type": "string", "minLength": 4, "maxLength": 9},
    "unicode enum": {"enum": ["größe", "日本語", "🙂🙃", "naïve—dash", "\u200b", 'quote " and \\ slash']},
    "unicode property": record(**{"schlüssel": WORD, "键": {"type": "integer", "minimum": 0, "maximum": 99}}),
    "pattern": {"type": "string", "pattern": "^[A-Z][a-z]{2,4}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "flat record": record(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 130}, ok={"type": "boolean"}),
    "optional properties": OBJECT | {"properties": {"a": WORD, "b": {"type": "null"}, "c": {"type": "boolean"}}},
    "nested records": record(outer=record(inner=record(leaf={"enum": ["x", "y"]}))),
    "array of bounded length": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "empty array": {"type": "array", "maxItems": 0},
    "nested arrays": {
        "type": "array", "maxItems": 3,
        "items": {"type": "array", "maxItems": 2, "items": {"type": "array", "maxItems": 1, "items": {"enum": [0, 1]}}},
    },
    "tuple": {"type": "array", "prefixItems": [WORD, {"type": "null"}], "items": False, "minItems": 2},
    "array of records": {"type": "array", "items": record(id={"type": "integer", "minimum": 0, "maximum": 9}),
                         "minItems": 1, "maxItems": 3},
    "any of": {"anyOf": [record(circle=WORD), record(square={"type": "boolean"}), {"type": "null"}]},
    "several types": {"type": ["integer", "null", "boolean"], "minimum": -9, "maximum": 9},
    "definitions": {"$defs": {"leaf": WORD}, **record(a={"$ref": "#/$defs/leaf"}, b={"$ref": "#/$defs/leaf"})},
    "recursion": {
        "$defs": {"node": OBJECT | {"properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                                    "required": ["next"]}},
        "$ref": "#/$defs/node",
    },
    "map": {"type": "object", "patternProperties": {"^[a-z]{1,3}$": {"type": "boolean"}}, "maxProperties": 2,
            "additionalProperties": False},
    "all of": {"allOf": [record(a=WORD), {"type": "object", "properties": {"a": {"minLength": 2}}}]},
}  # fmt: skip

REGEXES: dict[str, str] = {
    "digits": r"[0-9]{1,12}",
    "letters then digits": r"[a-z]{3}[0-9]{2}",
    "alternatives": r"(yes|no|maybe)",
    "one is a prefix of another": r"(foo|foobar|foobarbaz)",
    "optional part": r"colou?r",
    "repeated group": r"(ab){1,5}c",
    "nested groups": r"((a|b)(c|d)){2,3}",
    "day": r"20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9])?",
    "ip address": r"((25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])",
    "e-mail": r"[a-z]{1,8}(\.[a-z]{1,8})?@[a-z]{1,8}\.(com|org)",
    "hexadecimal colour": r"#[0-9a-fA-F]{6}",
    "decimal": r"-?(0|[1-9][0-9]{0,4})(\.[0-9]{1,3})?",
    "identifier": r"[a-zA-Z_][a-zA-Z0-9_]{0,10}",
    "call": r"[a-z_]{1,8}\(([0-9]{1,2}(, [0-9]{1,2}){0,2})?\)",
    "quoted": r"\"[^\"\\\n]{0,10}\"",
    "whitespace": r"a[ \t]{1,3}b\n{1,2}c",
    "class without": r"[^a-z\n]{1,8}",
    "escapes": r"\d{2}\.\w{3}\s\[x\]",
    "greek": "[\N{GREEK SMALL LETTER ALPHA}-\N{GREEK SMALL LETTER OMEGA}]{1,6}",
    "emoji": r"(🙂|🚀|日本){1,4}",
    "latin letters with accents": r"(é|ü|ñ|ß){2,5}",
    "empty or a word": r"(|word)",
    "exact text": r"There is exactly one way to say this\.",
    "list": r"- [a-z]{1,6}(\n- [a-z]{1,6}){0,2}",
    "spans tokens": r"(de|def|def |define|de fine){1,3}",
    "semantic version": r"(0|[1-9][0-9]?)\.(0|[1-9][0-9]?)\.(0|[1-9][0-9]?)(-(alpha|beta)\.[0-9])?",
}
