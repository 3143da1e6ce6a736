"""Values of single samples on disk: plain arrays in a folder, written as they come and read lazily."""

from packprop.store.reading import Store, StoredArray
from packprop.store.writing import StoreWriter

__all__ = ["Store", "StoreWriter", "StoredArray"]
