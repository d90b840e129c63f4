// The fixture is shared with other test programs; each compiles it once.
#include "tests/support/fabric_fixture.cc"
