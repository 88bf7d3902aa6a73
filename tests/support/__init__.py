"""What tests share: small models and their files, rigs over csrc by ctypes, references, a server,
fuzzers and the record of bits, which are programs of their own."""
