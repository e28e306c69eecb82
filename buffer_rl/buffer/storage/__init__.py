"""Large payloads: in the object store, written once by their producer and owned by a storage process."""
