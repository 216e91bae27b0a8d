"""Object stores, such as S3: places named by URLs, which are read and written through fsspec."""
