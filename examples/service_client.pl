#!/usr/bin/env perl
# A worker of `paceline serve` in Perl, with the modules that come with it:
#
#   paceline serve --batch 256 --workers 2
#   PACELINE_URL=http://127.0.0.1:7070 PACELINE_TOKEN=... perl examples/service_client.pl NAME MILLISECONDS_PER_SAMPLE
#
# It asks for its part of each round, works on it, and reports how long that took.
use strict;
use warnings;
use HTTP::Tiny;
use JSON::PP;
use Time::HiRes qw(sleep time);

$| = 1;
my $url = ($ENV{PACELINE_URL} // "http://127.0.0.1:7070") . "/v1/jobs/default/workers";
my ($name, $milliseconds) = (shift // "perl", shift // 1);
my ($http, $secret) = (HTTP::Tiny->new(timeout => 60), "");

sub ask {
    my ($method, $path, $body) = @_;
    my $token   = $ENV{PACELINE_TOKEN} // "";
    my %headers = ("Authorization" => "Bearer $token", "Content-Type" => "application/json", "X-Worker-Secret" => $secret);
    my $answer  = $http->request($method, $url . $path, { headers => \%headers, $body ? (content => encode_json($body)) : () });
    die "$answer->{status}: $answer->{content}\n" unless $answer->{success};
    return ($answer->{status}, $answer->{content} ? decode_json($answer->{content}) : {});
}

$secret = (ask("POST", "", { name => $name }))[1]->{secret};
for (my $done = 0; $done < 8;) {
    my ($status, $part) = ask("GET", "/$name/next?wait=30");
    next if $status == 202;    # the part is not planned yet: ask again
    my $began = time;
    sleep($part->{samples} * $milliseconds / 1000);    # train on them instead
    ask("POST", "/$name/reports", { round => $part->{round}, samples => $part->{samples}, seconds => time - $began });
    print "round $part->{round}: $part->{samples} samples\n";
    $done++;
}
ask("DELETE", "/$name");
