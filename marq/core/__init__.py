"""The rules of marq, without I/O.

Everything that decides what happens to a message lives here, in plain Python: no Kafka, no Faust, no asyncio, no
clock. Time, ids and randomness come in as arguments. The worker, the simulator and the Spark jobs call the same code.
May import `marq.errors` and `marq.protocol`. Of others it needs msgspec.

====================  ==================================================================================="""
