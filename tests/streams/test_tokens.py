"""Tests for synapse_replication.streams.tokens."""

from __future__ import annotations

import pickle

from hypothesis import given, settings, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import TokenError
from synapse_replication.storage.row_pages import sql_between
from synapse_replication.storage.transactions import connect
from synapse_replication.streams.tokens import MultiWriterStreamToken, PersistedPosition
from synapse_replication.testing.servers import shared_postgres

Token = MultiWriterStreamToken

WRITERS = ["a", "b", "c", "d"]
NUMBERS = {writer: number for number, writer in enumerate(WRITERS, 1)}
NAMES = {number: writer for writer, number in NUMBERS.items()}

tokens = st.builds(
    Token,
    st.integers(0, 12),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 15)),
)
deterministic = settings(derandomize=True, deadline=None)


def rows_of(token: Token) -> set[tuple[str, int]]:
    """
    Return the rows that a token covers, by brute force; ``d`` has no entry in any map.
    """
    return {
        (writer, id_)
        for writer in WRITERS
        for id_ in range(1, 20)
        if id_ <= token.get_stream_pos_for_instance(writer)
    }


def is_between(low: Token, high: Token, writer: str, id_: int) -> bool:
    """Return whether a row is after ``low`` and not after ``high``."""
    row = PersistedPosition(writer, id_)
    return row.persisted_after(low) and not row.persisted_after(high)


class LawTests(SynchronousTestCase):
    """A token is equivalent to the set of rows that it covers."""

    @deterministic
    @given(tokens)
    def test_round_trip(self, token: Token) -> None:
        """A token survives its text form and pickling."""
        text = token.to_string(NUMBERS.__getitem__)
        self.assertEqual(Token.parse(text, NAMES.__getitem__), token)
        self.assertEqual(pickle.loads(pickle.dumps(token)), token)
        self.assertEqual(hash(pickle.loads(pickle.dumps(token))), hash(token))

    @deterministic
    @given(tokens, tokens)
    def test_order(self, one: Token, other: Token) -> None:
        """``is_before_or_eq`` is the subset relation of the covered rows."""
        self.assertEqual(one.is_before_or_eq(other), rows_of(one) <= rows_of(other))
        self.assertEqual(one == other, rows_of(one) == rows_of(other))

    @deterministic
    @given(tokens, tokens)
    def test_maximum(self, one: Token, other: Token) -> None:
        """The maximum covers the union of the rows."""
        maximum = one.copy_and_advance(other)
        self.assertEqual(rows_of(maximum), rows_of(one) | rows_of(other))
        self.assertEqual(other.copy_and_advance(one), maximum)

    @deterministic
    @given(tokens, tokens, tokens)
    def test_associative(self, one: Token, two: Token, three: Token) -> None:
        """The maximum is associative."""
        self.assertEqual(
            one.copy_and_advance(two).copy_and_advance(three),
            one.copy_and_advance(two.copy_and_advance(three)),
        )

    @deterministic
    @given(tokens, tokens)
    def test_range(self, low: Token, high: Token) -> None:
        """
        A row is in the range if the high token covers it and the low one does not.
        """
        between = {
            (writer, id_)
            for writer, id_ in rows_of(Token(20))
            if is_between(low, high, writer, id_)
        }
        self.assertEqual(between, rows_of(high) - rows_of(low))

    @deterministic
    @given(tokens, tokens, st.integers(0, 16))
    def test_partial_read(self, low: Token, other: Token, upto: int) -> None:
        """After a partial read, the token covers exactly the rows that were read."""
        high = low.copy_and_advance(other)
        middle = low.after_partial_read(high, upto)
        read = {row for row in rows_of(high) - rows_of(low) if row[1] <= upto}
        self.assertEqual(rows_of(middle), rows_of(low) | read)
        self.assertTrue(low.is_before_or_eq(middle))
        self.assertTrue(middle.is_before_or_eq(high))

    @deterministic
    @given(tokens, st.integers(0, 16))
    def test_bound(self, token: Token, most: int) -> None:
        """A bounded token covers the same rows up to the bound."""
        bounded = token.bound_stream_token(most)
        self.assertEqual(
            rows_of(bounded), {row for row in rows_of(token) if row[1] <= most}
        )


class TextTests(SynchronousTestCase):
    """The text forms of tokens."""

    def test_forms(self) -> None:
        """The text is a number, or the minimum with the writers that are above it."""
        self.assertEqual(Token(5).to_string(NUMBERS.__getitem__), "5")
        self.assertEqual(
            Token(5, {"b": 9, "a": 7}).to_string(NUMBERS.__getitem__), "m5~1.7~2.9"
        )

    def test_entry_below_the_minimum(self) -> None:
        """An entry at or below the minimum is skipped."""
        token = Token.parse("m5~1.3~2.5~3.6", NAMES.__getitem__)
        self.assertEqual(token, Token(5, {"c": 6}))
        self.assertEqual(token.instance_map, {"c": 6})

    def test_trailing_separator(self) -> None:
        """A trailing separator, and text with only a minimum, are accepted."""
        self.assertEqual(Token.parse("m5~", NAMES.__getitem__), Token(5))
        self.assertEqual(Token.parse("m5", NAMES.__getitem__), Token(5))

    def test_named_twice(self) -> None:
        """If a writer is named twice, the greater position counts."""
        self.assertEqual(
            Token.parse("m5~1.9~1.7", NAMES.__getitem__), Token(5, {"a": 9})
        )

    def test_no_tokens(self) -> None:
        """Text that is not a token is refused; the error contains the text."""
        for text in (
            "", "m", "x", "-5", "+5", "5 ", "1_0", "\u0665", "m5~1", "m5~1.x", "m~1.5",
            "m5~9.7", "m5~a.7", str(2**63), "m5~1.7.8",
        ):  # fmt: skip
            with self.assertRaises(TokenError) as caught:
                Token.parse(text, NAMES.__getitem__)
            self.assertEqual(caught.exception.text, text)


class SqlTests(SynchronousTestCase):
    """The condition for a WHERE clause, on a real table."""

    def test_agrees_with_brute_force(self) -> None:
        """PostgreSQL selects exactly the rows between two tokens."""
        connection = connect(shared_postgres().new_database())
        self.addCleanup(connection.close)
        cursor = connection.cursor()
        cursor.execute("CREATE TABLE rows (id bigint, writer text)")
        rows = [*rows_of(Token(19)), *((None, id_) for id_ in range(1, 20))]
        cursor.executemany("INSERT INTO rows (writer, id) VALUES (%s, %s)", rows)

        @settings(derandomize=True, deadline=None, max_examples=200)
        @given(tokens, tokens)
        def check(low: Token, high: Token) -> None:
            condition, parameters = sql_between(low, high, "id", "writer")
            cursor.execute(f"SELECT writer, id FROM rows WHERE {condition}", parameters)
            self.assertEqual(
                set(cursor.fetchall()),
                {
                    (writer, id_)
                    for writer, id_ in rows
                    if is_between(low, high, writer or "", id_)
                },
            )

        check()
