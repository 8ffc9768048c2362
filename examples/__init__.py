"""Small programs that use marq. `embedded` is one program; `standalone/` has its parts as programs of their own."""
