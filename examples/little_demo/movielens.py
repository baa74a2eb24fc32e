"""MovieLens as a click log: raw 64-bit ids of users, movies and genres; the label says whether the movie was liked."""

from __future__ import annotations

import csv
import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from examples.little_demo.batch import Batch, DataSet, Share, TableFacts

DATA_FILE = Path(__file__).parent / "data" / "movielens_latest_small_2016.csv.gz"
FEATURES = ("user", "movie", "genre")
LIKED = 4.0
"""Ratings from here on, in stars, count as "liked": the label 1."""


def raw_id(text: str) -> int:
    """The id of a string: a hash, as feature pipelines make them. Any of the 2^64 int64 values, half of them negative.

    Nothing numbers the users or movies 0, 1, 2 ..: hashed tables need no vocabulary.
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


@dataclass(frozen=True, kw_only=True)
class Ratings:
    """The whole log in host memory, one row a rating, oldest first."""

    users: Tensor
    """int64 [N] ids."""
    movies: Tensor
    """int64 [N] ids."""
    genres: Tensor
    """int64 [sum of genre_lengths] ids: the genres of rating 0, then those of rating 1 .."""
    genre_lengths: Tensor
    """int64 [N]: how many genres the movie has. May be 0."""
    labels: Tensor
    """float32 [N]: 1 = liked."""

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Tensor) -> Batch:
        """The ratings at some rows.

        Args:
            rows: int64 [B], any order.
        """
        lengths = self.genre_lengths[rows]
        first = (self.genre_lengths.cumsum(0) - self.genre_lengths)[rows]
        # Positions of the bags' ids, bag after bag: first[b], first[b] + 1 .. first[b] + lengths[b] - 1.
        shift = first - (lengths.cumsum(0) - lengths)
        positions = torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)
        one = torch.ones_like(rows)
        ids = KeyedJaggedTensor(
            keys=list(FEATURES),
            values=torch.cat([self.users[rows], self.movies[rows], self.genres[positions]]),
            lengths=torch.cat([one, one, lengths]),
        )
        return Batch(torch.empty(len(rows), 0), ids, self.labels[rows])


class MovieLens(DataSet):
    """80 % of the ratings to train on, in another order every epoch, and 20 % held out, drawn at random."""

    name = "movielens"
    unit = "ratings"
    features = FEATURES

    def __init__(self, ratings: Ratings, *, seed: int) -> None:
        """Draw the rows that are held out, and decide the order of each epoch.

        Args:
            ratings: From `load_ratings`.
            seed: Of both.
        """
        self.ratings = ratings
        self._seed = seed
        self.train_rows, self.test_rows = split_rows(len(ratings), seed)

    def tables(self) -> list[TableFacts]:
        ids = {"user": self.ratings.users, "movie": self.ratings.movies, "genre": self.ratings.genres}
        return [
            TableFacts(
                feature=feature,
                ids=ids[feature],
                planned_rows=len(torch.unique(ids[feature])),
                pooling=PoolingType.MEAN if feature == "genre" else PoolingType.SUM,
                is_cached=feature != "genre",
            )
            for feature in FEATURES
        ]

    def describe(self) -> str:
        return f"MovieLens, {len(self.train_rows):,} ratings to learn, {len(self.test_rows):,} held out"

    def num_batches(self, batch_size: int) -> int | None:
        return len(rank_batches(self.train_rows, Share(batch_size=batch_size)))

    def train_batches(self, share: Share, epoch: int) -> Iterator[Batch]:
        rows = shuffled(self.train_rows, self._seed, epoch)
        return (self.ratings.batch(r) for r in rank_batches(rows, share)[share.first :: share.step])

    def test_batches(self, share: Share) -> Iterator[Batch]:
        return (self.ratings.batch(r) for r in rank_batches(self.test_rows, share)[share.first :: share.step])


def load_ratings(path: Path = DATA_FILE) -> Ratings:
    """Read the log: columns userId, movieId, rating, timestamp, genres (joined by ``|``)."""
    users: list[int] = []
    movies: list[int] = []
    genres: list[int] = []
    genre_lengths: list[int] = []
    labels: list[float] = []
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            names = [name for name in row["genres"].split("|") if name != "(no genres listed)"]
            users.append(raw_id(f"user:{row['userId']}"))
            movies.append(raw_id(f"movie:{row['movieId']}"))
            genres.extend(raw_id(f"genre:{name}") for name in names)
            genre_lengths.append(len(names))
            labels.append(float(float(row["rating"]) >= LIKED))
    return Ratings(
        users=torch.tensor(users),
        movies=torch.tensor(movies),
        genres=torch.tensor(genres),
        genre_lengths=torch.tensor(genre_lengths),
        labels=torch.tensor(labels),
    )


def split_rows(num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows to train on (80 %) and rows held out (20 %), drawn at random under the seed.

    Returns:
        Two int64 tensors, disjoint, together ``0 .. num_rows - 1``.
    """
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    num_train = num_rows * 4 // 5
    return order[:num_train], order[num_train:]


def shuffled(rows: Tensor, seed: int, epoch: int) -> Tensor:
    """The rows in the order of one epoch, the same on every rank."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch + 1)
    return rows[torch.randperm(len(rows), generator=generator)]


def rank_batches(rows: Tensor, share: Share) -> list[Tensor]:
    """All batches of one rank: every ``world_size``-th row, cut into parts of equal size, plus or minus one.

    No row is left out, none is read twice, and every rank gets the same number of batches: a rank that stopped
    earlier would leave the others waiting for it in their next collective.

    Args:
        rows: int64 [N], in reading order; N >= world_size.
        share: The rank's; whose turn it is among workers plays no part.

    Returns:
        int64 [<= ceil(batch_size / world_size)] rows a batch; empty batches do not occur. With fewer rows a rank than
        batches these are fewer, and larger.
    """
    num_batches = max(1, min(-(-len(rows) // share.batch_size), len(rows) // share.world_size))
    return list(rows[share.rank :: share.world_size].tensor_split(num_batches))
