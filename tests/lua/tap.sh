# For the tests that run recipes: verdicts in TAP, and a text in the current folder. Source it there.
count=0
verdict() { # STATUS NAME: a line of TAP, with the last output if it failed
    count=$((count + 1))
    if [ "$1" = 0 ]; then
        echo "ok $count - $2"
    else
        echo "not ok $count - $2"
        sed 's/^/# /' out err
    fi
}

# answers NAME STATUS TEXT COMMAND...: the command ends with the status, and its last words on standard error are TEXT.
answers() {
    name=$1 status=$2 text=$3
    shift 3
    "$@" >out 2>err
    got=$?
    [ $got = "$status" ] && [ "$(cat err)" = "$text" ]
    verdict $? "$name"
}

# holds NAME CONDITION...: the condition is true.
holds() {
    name=$1
    shift
    "$@"
    verdict $? "$name"
}

last_line() { [ "$(tail -n 1 "$1" | sed 's/[0-9]\.[0-9]*$/N/')" = "$2" ]; }

# Some text with something to learn.
awk 'BEGIN { split("light darkness water heaven earth day night tree river stone", w, " ")
    for (i = 0; i < 900; i++)
        print "And the " w[i % 10 + 1] " was upon the " w[i * 7 % 9 + 2] " of the " w[i * 3 % 10 + 1] "." }' >text
